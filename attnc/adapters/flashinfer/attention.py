"""FlashInfer's wrapper of mixed batches, and those with a sink: a logit of each head that joins the
denominator. All are prefills or decodes of pages, whose arguments stand in other places.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from attnc.adapters.flashinfer.arguments import DType, check_integer, check_layout
from attnc.adapters.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from attnc.adapters.flashinfer.paged import Cache, PagedWrapper
from attnc.adapters.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from attnc.adapters.flashinfer.wrapper import Result, read_starts
from attnc.adapters.specs import Wanted, number_of, refuse
from attnc.api.tensors import INTEGERS, GivenTensors


class BatchAttention:
    """Attends with any number of queries per request, prompts and decoded tokens in any mixture, against its
    pages. A graph that is captured around `run` reads the tables of the plan before it.
    """

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        """device: of the tables; without a GPU the CPU, where kernels are interpreted."""
        place = device if torch.cuda.is_available() else "cpu"
        self._pages = BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(0, device=place), check_layout(kv_layout)
        )

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Takes qo_indptr and kv_indptr: [B + 1], kv_indices: [pages], and kv_len_arr: [B], keys of each
        request, which may have more pages than these take. The last query of a request stands at its last
        key. ValueError or TypeError names an argument.
        """
        refuse("plan", use_profiler=use_profiler)
        page = check_integer("plan: page_size", page_size, 1)
        given = GivenTensors("plan")
        given.check("kv_len_arr", kv_len_arr, "B", INTEGERS, anywhere=True)
        for name, x in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            given.check(name, x, "B+1", INTEGERS, anywhere=True)
        given.check("kv_indices", kv_indices, "pages", INTEGERS, anywhere=True)
        self._pages.plan(
            qo_indptr,
            *_drop_pages(page, kv_indptr, kv_indices, kv_len_arr),
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page,
            head_dim_vo,
            causal=causal,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )
        self._softcap = max(number_of("plan: logits_soft_cap", logits_soft_cap, 0.0), 0.0)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: one kernel takes any strides."""

    def run(
        self,
        q: torch.Tensor,
        kv_cache: Cache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: object = None,
    ) -> Result:
        """Returns (o: [T, Hq, Dv], lse: f32[T, Hq] in base 2) of q: [T, Hq, D] against pages, as those of
        `BatchPrefillWithPagedKVCacheWrapper`. logits_soft_cap: that of the plan, or 0, which says nothing.
        """
        refuse("run", profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        self._pages._plan_of_run()
        softcap = number_of("run: logits_soft_cap", logits_soft_cap, 0.0)
        if softcap > 0 and softcap != self._softcap:
            raise ValueError(f"run: logits_soft_cap: expected {self._softcap}, as planned, got {softcap}")
        return self._pages.run(
            q, kv_cache, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=True
        )


def _drop_pages(
    page: int, indptr: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tables without the pages behind the last key of a request, and the keys of each last page."""
    ranges, counts = [*pairwise(read_starts("kv_indptr", indptr))], lengths.tolist()
    for request, (length, (first, last)) in enumerate(zip(counts, ranges, strict=True)):
        if not 0 <= length <= (room := (last - first) * page):
            raise ValueError(f"plan: kv_len_arr: expected 0 .. {room} for request {request}, got {length}")
    most = ranges[-1][1] if ranges else 0
    if len(indices) < most:
        raise ValueError(f"plan: kv_indices: expected at least {most} numbers, got {len(indices)}")
    used = [-(-length // page) for length in counts]
    if used != [last - first for first, last in ranges]:
        kept = [
            place
            for (first, _), count in zip(ranges, used, strict=True)
            for place in range(first, first + count)
        ]
        indices = indices[torch.tensor(kept, dtype=torch.int64, device=indices.device)]
        indptr = torch.tensor([0, *used], dtype=indptr.dtype).cumsum(0).to(indptr)
    return indptr, indices, (lengths - 1) % page + 1


class _WithSinks(PagedWrapper):
    """What the wrappers with sinks share: `run`, in which these stand third."""

    def _keep(self, wanted: Wanted, *given: Any, **options: Any) -> None:
        super()._keep(wanted, *given, **options)
        self._scale = wanted.scale

    def run(  # type: ignore[override]  # as said
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        sinks: torch.Tensor | None = None,
        sm_scale: float | None = None,
        **options: Any,
    ) -> Result:
        """Returns o, and with return_lse lse, of softmax with the sinks in its denominator. sinks: f32[Hq];
        sm_scale: in the place of the plan's, which None leaves.
        """
        if sinks is None:
            raise TypeError("run: sinks: expected a tensor, got None")
        self._plan_of_run()
        scale, run = number_of("run: sm_scale", sm_scale, self._scale), super().run
        return self._run_revised(
            lambda: self._revise(scale=scale), lambda: run(q, paged_kv_cache, sinks=sinks, **options)
        )

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: Cache, *given: Any, **options: Any) -> Result:
        """Returns (o, lse), as `run` does."""
        return self.run(q, paged_kv_cache, *given, return_lse=True, **options)


class BatchAttentionWithAttentionSinkWrapper(_WithSinks, BatchPrefillWithPagedKVCacheWrapper):
    """The prefill of pages with a sink of each head, which `run` is given behind the pages."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        """Types, head dimensions and the window are those of `plan`: what is said of them here chooses
        FlashInfer's kernel. ValueError for positions that are encoded inside of attention.
        """
        if pos_encoding_mode != "NONE":
            name = "BatchAttentionWithAttentionSinkWrapper: pos_encoding_mode"
            raise ValueError(f"{name}: expected 'NONE', got {pos_encoding_mode!r}")
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )


class BatchDecodeWithAttentionSinkWrapper(_WithSinks, BatchDecodeWithPagedKVCacheWrapper):
    """The decoding of pages with a sink of each head, which `run` is given behind the pages."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        backend: str = "auto",
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
        **options: Any,
    ) -> None:
        """Types, head dimensions and the window are those of `plan`. options: buffers of graphs, as those of
        `BatchDecodeWithPagedKVCacheWrapper`.
        """
        super().__init__(float_workspace_buffer, kv_layout, backend=backend, **options)
