"""FlashInfer's wrappers that prefill and decode in one call (POD-Attention; Kamath et al. 2024, arXiv
2410.18038). Here they are a call each: results are the same, and the device runs them one after the other.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from attnc.adapters.flashinfer.arguments import DType, check_integer, choose_scale
from attnc.adapters.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from attnc.adapters.flashinfer.paged import Cache, count_keys
from attnc.adapters.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from attnc.adapters.flashinfer.wrapper import read_starts
from attnc.adapters.specs import refuse
from attnc.api.tensors import INTEGERS, GivenTensors

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class PODWithPagedKVCacheWrapper:
    """Prefills one request, whose keys are an ordinary tensor, and decodes a batch against pages."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: object = None,
    ) -> None:
        refuse("PODWithPagedKVCacheWrapper", jit_args=jit_args)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            True,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any) -> None:
        """Takes other workspaces, of which nothing is used."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Takes the tables of what is decoded, as `BatchDecodeWithPagedKVCacheWrapper.plan` does."""
        self._decode.plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode,
            window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            data_type=data_type,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        self._positions, self._head_dim = pos_encoding_mode, head_dim

    begin_forward = plan

    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *jit_arguments: object,
    ) -> Pair:
        """Returns (o: [M, Hq, D] of q_p against k_p and v_p, as `single_prefill_with_kv_cache` does, and
        o: [B, Hq, D] of q_d against its pages). As in FlashInfer the plan says how is decoded, and there is
        no lse, whatever return_lse_p and return_lse_d say; a scale, window or encoding of positions that
        differs from the plan's is refused. q_scale, k_scale, v_scale: of decoding.
        """
        refuse("run", custom_mask_d=custom_mask_d, packed_custom_mask_d=packed_custom_mask_d)
        refuse("run", rope_scale_d=rope_scale_d, rope_theta_d=rope_theta_d, jit_arguments=jit_arguments)
        plan = self._decode._plan_of_run()
        scale = choose_scale("run", sm_scale_d, self._head_dim)
        for name, given, none, planned in (
            ("sm_scale_d", None if sm_scale_d is None else scale, None, plan.wanted.scale),
            ("window_left_d", window_left_d, -1, plan.window_left),
            ("pos_encoding_mode_d", pos_encoding_mode_d, "NONE", self._positions),
        ):
            if given not in (none, planned):
                raise ValueError(f"run: {name}: expected {planned!r}, as planned, got {given!r}")
        prefilled = single_prefill_with_kv_cache(
            q_p,
            k_p,
            v_p,
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
            causal=causal_p,
            kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p,
            window_left=window_left_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
        )
        decoded = self._decode.run(q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        assert isinstance(prefilled, torch.Tensor)
        assert isinstance(decoded, torch.Tensor)
        return prefilled, decoded

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""


class BatchPODWithPagedKVCacheWrapper:
    """Prefills one batch and decodes another, both against pages."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._prefill, self._decode = (
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout) for _ in range(2)
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    def plan(
        self,
        qo_indptr_p: torch.Tensor,
        kv_indptr_p: torch.Tensor,
        kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor,
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Takes the tables of both batches, each as `BatchPrefillWithPagedKVCacheWrapper.plan` does."""
        prefilled = qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p
        decoded = qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d
        _check("p", page_size, *prefilled)
        _check("d", page_size, *decoded)
        for wrapper, (starts, indptr, indices, last) in ((self._prefill, prefilled), (self._decode, decoded)):
            wrapper.plan(
                starts,
                indptr,
                indices,
                last,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type or data_type or "float16",
                kv_data_type=kv_data_type or data_type,
            )

    begin_forward = plan

    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: Cache,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> Pair | tuple[Pair, Pair]:
        """Returns (o of q_p, o of q_d), each [T, Hq, D], and with return_lse a pair of these and of their
        lse: f32[T, Hq], in base 2. Decoded queries see all of their keys, causal_p is of the others. q_scale,
        k_scale, v_scale: of decoding. ValueError or TypeError names an argument that differs from the plan or
        is not supported: masks, for which FlashInfer has no place where those of a request begin.
        """
        refuse("run", custom_mask_p=custom_mask_p, packed_custom_mask_p=packed_custom_mask_p)
        prefilled = self._prefill._run_revised(
            lambda: self._prefill._revise(causal=bool(causal_p)),
            lambda: self._prefill.run(q_p, paged_kv_cache_p, return_lse=True),
        )
        decoded = self._decode.run(
            q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True
        )
        results, sums = zip(prefilled, decoded, strict=True)
        return (results, sums) if return_lse else results

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""


def _check(
    which: str,
    page: Any,
    starts: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """Holds the tables of one of the batches to their shapes, by the names that they have here."""
    given, names = (
        GivenTensors("plan"),
        (f"kv_indptr_{which}", f"kv_indices_{which}", f"last_page_len_{which}"),
    )
    given.check(names[2], last, "B", INTEGERS, anywhere=True)
    for name, x in ((f"qo_indptr_{which}", starts), (names[0], indptr)):
        given.check(name, x, "B+1", INTEGERS, anywhere=True)
    given.check(names[1], indices, "pages", INTEGERS, anywhere=True)
    read_starts(f"qo_indptr_{which}", starts)
    count_keys(names, check_integer("plan: page_size", page, 1), indptr, indices, last)
