"""FlashInfer's wrappers of paged attention: `plan` takes the tables of a batch as CSR, `run` the tensors of a
layer. FlashInfer itself is not imported.

    from attnc.adapters.flashinfer import BatchDecodeWithPagedKVCacheWrapper

lse leaves in base 2, as FlashInfer's functions that merge states expect.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from attnc.adapters.specs import (
    NARROW,
    Kernel,
    Wanted,
    dtype_of,
    expand_scales,
    kernel,
    made_for,
    number_of,
    refuse,
)

# --- what both wrappers share -------------------------------------------------------------------------------


Cache: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
QKV: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
DType: TypeAlias = str | torch.dtype

_LOG2E = 1 / math.log(2)


def dense_tables(
    page: int, width: int, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns block_table: i32[B, width] and kv_len: i32[B] of CSR tables, computed where those are.

    indptr: [B + 1]; indices: [pages in use]; last_page_len: [B], 1 .. page, not read where B has no page.
    Entries past a sequence's pages are pages of other sequences.
    """
    counts = indptr.diff()
    at = indptr[:-1, None] + torch.arange(width, device=indptr.device)
    if len(indices):
        table = indices[at.clamp(max=len(indices) - 1)]
    else:
        table = torch.zeros_like(at)
    kv_len = torch.where(counts > 0, (counts - 1) * page + last_page_len, 0)
    return table.int().contiguous(), kv_len.int()


@dataclass(frozen=True, slots=True)
class Plan:
    """What `run` calls. cache: dtype of k and v where they have 8 bits, whose scales the kernel takes; one:
    the scale that is none.
    """

    kernel: Kernel
    dtype: torch.dtype
    cache: torch.dtype | None
    one: torch.Tensor
    block_table: torch.Tensor
    kv_len: torch.Tensor
    heads: tuple[int, int]
    window_left: int


@dataclass(frozen=True, slots=True)
class Pages:
    """The tables of a batch: indptr [B + 1], indices [pages in use], last_page_len [B]; page: its rows."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    page: int


class PagedWrapper(ABC):
    """The constructor, what a plan keeps, and `run`."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        indptr_buffer: torch.Tensor | None,
        indices_buffer: torch.Tensor | None,
        last_page_len_buffer: torch.Tensor | None,
    ) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}")
        self._device = float_workspace_buffer.device
        self._layout = kv_layout
        self._capacity: tuple[int, int] | None = None
        if use_cuda_graph:
            given = {
                "paged_kv_indptr_buffer": indptr_buffer,
                "paged_kv_indices_buffer": indices_buffer,
                "paged_kv_last_page_len_buffer": last_page_len_buffer,
            }
            for name, buffer in given.items():
                if buffer is None:
                    raise ValueError(f"{name}: expected a tensor, as use_cuda_graph is set, got None")
            assert indices_buffer is not None
            assert last_page_len_buffer is not None
            self._capacity = (len(last_page_len_buffer), len(indices_buffer))
        self._planned: Plan | None = None

    def _keep(self, wanted: Wanted, tables: Pages, heads: tuple[int, int], window_left: int) -> None:
        """Plans the calls that follow; what a captured graph reads changes only if nothing is refused."""
        made = kernel(wanted)
        block_table, kv_len = self._tables(tables)
        known = self._planned
        one = torch.ones((), device=self._device) if known is None else known.one
        self._planned = Plan(made, wanted.dtype, wanted.cache, one, block_table, kv_len, heads, window_left)

    def _tables(self, tables: Pages) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns dense tables on the device, with CUDA graphs always in the tensors that the graph reads."""
        indptr, indices, last_page_len = tables.indptr, tables.indices, tables.last_page_len
        if len(indptr) != len(last_page_len) + 1:
            raise ValueError(
                f"indptr: expected {len(last_page_len) + 1} numbers, one more than last_page_len has,"
                f" got {len(indptr)}"
            )
        if self._capacity is None:
            width = int(indptr.diff().max()) if len(indptr) > 1 else 0
        else:
            batch, width = self._capacity
            if len(last_page_len) != batch or len(indices) > width:
                raise ValueError(
                    f"indices: expected {batch} sequences with at most {width} pages, as in the buffers,"
                    f" got {len(last_page_len)} with {len(indices)}"
                )
        csr = (table.to(self._device) for table in (indptr, indices, last_page_len))
        made = dense_tables(tables.page, max(width, 1), *csr)
        if self._capacity is None or self._planned is None:
            return made
        old = self._planned.block_table, self._planned.kv_len
        for target, source in zip(old, made, strict=True):
            target.copy_(source)
        return old

    def _kv_shape(self, page: int) -> str:
        if page < 1:
            raise ValueError(f"plan: page_size: expected at least 1, got {page}")
        axes = "B, N, Hkv, D" if self._layout == "NHD" else "B, Hkv, N, D"
        return f"[{axes}] via paged(block_table, page = {page})"

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *,
        q_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        **unsupported: object,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns o: [T, Hq, D] of q: [T, Hq, D], and with return_lse lse: f32[T, Hq] in base 2; decoding, T
        is B.

        paged_kv_cache: (K, V), each [pages, page, Hkv, D] or [pages, Hkv, page, D] as kv_layout says, or one
        tensor with an axis of two after that of pages. k_scale, v_scale: what K and V of 8 bits are to be
        multiplied by, a number, or f32 of one element or for each K/V head. ValueError or TypeError names an
        argument that differs from the plan or is not supported.
        """
        given: dict[str, object] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        plan, k, v = self._check_run(q, paged_kv_cache, given, window_left, **unsupported)
        o = torch.empty_like(q) if out is None else out
        found = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        scales: tuple[torch.Tensor, ...] = ()
        if plan.cache is not None:
            shape = (len(plan.kv_len), plan.heads[1])
            scales = (_scale("k_scale", k_scale, plan, shape), _scale("v_scale", v_scale, plan, shape))
        self._launch(plan, (q, k, v), scales, (o, found))
        return (o, torch.mul(found, _LOG2E, out=lse)) if return_lse else o

    @abstractmethod
    def _launch(
        self, plan: Plan, qkv: QKV, scales: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Writes o: [T, Hq, D] and lse: f32[T, Hq] in base e, for q: [T, Hq, D] and the pools of K and V.
        scales: of K and V, f32[B, Hkv], where the kernel takes them.
        """

    def _check_run(
        self,
        q: torch.Tensor,
        cache: Cache,
        scales: dict[str, object],
        window_left: int | None,
        **rest: object,
    ) -> tuple[Plan, torch.Tensor, torch.Tensor]:
        plan = self._planned
        if plan is None:
            raise RuntimeError("run: expected a call of plan() before")
        refuse("run", **rest)
        for name, scale in scales.items():
            is_taken = plan.cache is not None and name != "q_scale"
            if not is_taken and (isinstance(scale, torch.Tensor) or scale not in (None, 1)):
                what = "of queries" if name == "q_scale" else "of a cache of 16 bits"
                raise ValueError(f"run: {name}: expected None or 1.0 {what}, got {scale!r}")
        if window_left not in (None, plan.window_left):
            raise ValueError(f"run: window_left: expected {plan.window_left}, as planned, got {window_left}")
        if dtype_of("q", q) != plan.dtype:
            raise TypeError(f"q: expected dtype {plan.dtype}, as planned, got {q.dtype}")
        k, v = (cache[:, 0], cache[:, 1]) if isinstance(cache, torch.Tensor) else cache
        for x in (k, v):
            if x.dtype != (plan.cache or plan.dtype):
                raise TypeError(
                    f"paged_kv_cache: expected dtype {plan.cache or plan.dtype}, as planned, got {x.dtype}"
                )
        found = q.shape[1], k.shape[2 if self._layout == "NHD" else 1]
        if found != plan.heads:
            raise ValueError(f"q, paged_kv_cache: expected {plan.heads} heads, as planned, got {found}")
        return plan, k, v


def refuse_rotation(pos_encoding_mode: str, **rope: object) -> None:
    """Raises ValueError where q and K are to be rotated inside of attention."""
    if pos_encoding_mode != "NONE":
        raise ValueError(f"plan: pos_encoding_mode: expected 'NONE', got {pos_encoding_mode!r}")
    refuse("plan", **rope)


def _scale(name: str, scale: float | torch.Tensor | None, plan: Plan, shape: tuple[int, int]) -> torch.Tensor:
    """Returns a scale of each sequence and K/V head."""
    given = plan.one if scale is None else scale
    return expand_scales(f"run: {name}", given, shape, plan.one.device)


def dtypes_planned(
    planned: DType, kv: DType | None, o: DType | None
) -> tuple[torch.dtype, torch.dtype | None]:
    """Returns the dtype of q and o, and that of K and V where it has 8 bits. TypeError for one that no kernel
    has queries of, ValueError where they are to differ otherwise.
    """
    given = (planned, kv or planned, o or planned)
    made = [getattr(torch, x, x) if isinstance(x, str) else x for x in given]
    if not isinstance(made[0], torch.dtype):
        raise TypeError(f"plan: q_data_type: expected a dtype, got {planned!r}")
    found = made_for("plan: q_data_type", made[0])
    cached = next((dtype for dtype in NARROW if dtype == made[1]), None)
    cache = cached if found in (torch.float16, torch.bfloat16) else None
    for name, dtype in zip(("kv_data_type", "o_data_type"), made[1:], strict=True):
        if dtype != found and not (name == "kv_data_type" and dtype is cache):
            raise ValueError(f"plan: {name}: expected {found}, like q_data_type, got {dtype}")
    return found, cache


def _of_cache(cache: torch.dtype | None) -> dict[str, Any]:
    """Returns what a kernel that reads a cache of this dtype is asked for besides."""
    return {} if cache is None else {"cache": cache, "k_scale": "k_scale", "v_scale": "v_scale"}


# --- one query for each sequence ----------------------------------------------------------------------------


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attends with one query per sequence against its pages. Of the workspace buffer only the device is used.

    With use_cuda_graph the three buffers say how many sequences and pages there may be; a graph captured
    around `run` then serves every later `plan`.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: object = None,
    ) -> None:
        refuse("BatchDecodeWithPagedKVCacheWrapper", jit_args=jit_args)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )

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
        logits_soft_cap: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        **unsupported: object,
    ) -> None:
        """Takes the tables of a batch: indptr [B + 1], indices [pages in use], last_page_len [B].

        sm_scale: by default 1 / sqrt(head_dim). window_left, logits_soft_cap: -1 and 0 or None for none.
        fixed_split_size: pages that a program takes, for results that do not depend on the rest of the batch.
        ValueError names what is not supported: rotation inside of attention, mixed dtypes, several queries.
        """
        refuse("plan", **unsupported)
        refuse_rotation(pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta)
        if q_len_per_req != 1:
            raise ValueError(f"plan: q_len_per_req: expected 1, got {q_len_per_req}")
        split_size = (fixed_split_size or 0) * page_size
        if split_size % 16 or split_size < 0:
            raise ValueError(f"plan: fixed_split_size: expected a multiple of 16 keys, got {split_size}")
        dtype, cache = dtypes_planned(data_type or q_data_type, kv_data_type, o_data_type)
        wanted = Wanted(
            name="batch_decode",
            dtype=dtype,
            head_dim=head_dim,
            scale=number_of("plan: sm_scale", sm_scale, head_dim**-0.5),
            q="[B, M, Hkv * G, D]",
            kv=self._kv_shape(page_size),
            o="[B, M, Hkv * G, D]",
            lse="[B, M, Hkv * G]",
            inputs=("block_table: i32[B, P]", "kv_len: i32[B]"),
            length="kv_len",
            mask="causal" if window_left < 0 else f"window({window_left}, 0)",
            softcap=number_of("plan: logits_soft_cap", logits_soft_cap, 0.0),
            decode=True,
            split=not disable_split_kv,
            split_size=split_size,
            **_of_cache(cache),
        )
        tables = Pages(indptr, indices, last_page_len, page_size)
        self._keep(wanted, tables, (num_qo_heads, num_kv_heads), window_left)

    def _launch(
        self, plan: Plan, qkv: QKV, scales: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Launches decoding: a sequence's one query is its row of q."""
        q, k, v = qkv
        o, lse = (x.unsqueeze(1) for x in out)
        plan.kernel(q.unsqueeze(1), k, v, plan.block_table, plan.kv_len, *scales, out=(o, lse))


# --- any number of queries ----------------------------------------------------------------------------------


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Any number of queries per sequence against its pages, packed end to end."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
        **unsupported: object,
    ) -> None:
        refuse("BatchPrefillWithPagedKVCacheWrapper", use_cuda_graph=use_cuda_graph, **unsupported)
        super().__init__(float_workspace_buffer, kv_layout, False, None, None, None)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        **unsupported: object,
    ) -> None:
        """Takes the tables of a batch, those of the pages as for decode, and qo_indptr: [B + 1].

        The last query of a sequence stands at its last key; window_left bounds the keys before a query and
        causal those after it. ValueError names what is not supported.
        """
        refuse(
            "plan",
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            **unsupported,
        )
        refuse_rotation(pos_encoding_mode, rope_scale=rope_scale, rope_theta=rope_theta)
        _check_head_dims(head_dim_qk, head_dim_vo)
        dtype, cache = dtypes_planned(q_data_type, kv_data_type, o_data_type)
        wanted = Wanted(
            name="batch_prefill",
            dtype=dtype,
            head_dim=head_dim_qk,
            scale=number_of("plan: sm_scale", sm_scale, head_dim_qk**-0.5),
            q="[T, Hkv * G, D] via ragged(qo_indptr)",
            kv=self._kv_shape(page_size),
            o="[T, Hkv * G, D]",
            lse="[T, Hkv * G]",
            inputs=("qo_indptr: i32[B + 1]", "block_table: i32[B, P]", "kv_len: i32[B]"),
            length="kv_len",
            mask=_mask(causal, window_left),
            softcap=number_of("plan: logits_soft_cap", logits_soft_cap, 0.0),
            **_of_cache(cache),
        )
        tables = Pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._keep(wanted, tables, (num_qo_heads, num_kv_heads), window_left)
        self._qo_indptr = qo_indptr.to(self._device, torch.int32)

    def _launch(
        self, plan: Plan, qkv: QKV, scales: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Launches a prefill: queries lie end to end, as the kernel takes them."""
        plan.kernel(*qkv, self._qo_indptr, plan.block_table, plan.kv_len, *scales, out=out)


def _check_head_dims(qk: int, vo: int | None) -> None:
    if vo not in (None, qk):
        raise ValueError(f"plan: head_dim_vo: expected {qk}, like head_dim_qk, got {vo}")


def _mask(causal: bool, window_left: int) -> str:
    """Writes the mask in the language; a window bounds the keys before a query alone."""
    before = f"q_pos - {window_left} <= kv_idx" if window_left >= 0 else "true"
    return f"{before} and causal" if causal else before
