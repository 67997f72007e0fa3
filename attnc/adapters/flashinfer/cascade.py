"""FlashInfer's cascade: prefixes that requests share are attended to once for all of them, and states of
attention are merged (FlashInfer; Ye et al. 2025, arXiv 2501.01005). Their lse is in base 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnc.adapters.flashinfer.arguments import LN2, LOG2E, DType, check_integer
from attnc.adapters.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from attnc.adapters.flashinfer.paged import Cache
from attnc.adapters.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from attnc.api.tensors import FLOATS, INTEGERS, NUMBERS, GivenTensors, refuse_gradients


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (v, s) over the keys of both states: v_a, v_b: [T, H, D]; s_a, s_b: f32[T, H], in base 2.

    A state without keys, s = -inf, changes nothing. ValueError or TypeError names the argument.
    """
    from attnc.runtime.merge import merge_states as merge  # Triton, which is told first whether to interpret

    _check(v_a, s_a, v_b, s_b)
    v, s = merge(v_a, s_a.float() * LN2, v_b, s_b.float() * LN2)
    return v, s * LOG2E


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Writes to v and s what `merge_state` returns, where mask: bool[T] says so, or everywhere."""
    merged = merge_state(v, s, v_other, s_other)
    if mask is not None:
        GivenTensors().check("mask", mask, str(len(v)), (torch.bool, torch.uint8, *INTEGERS))
        kept = mask.bool()[:, None]
        merged = torch.where(kept[..., None], merged[0], v), torch.where(kept, merged[1], s)
    v.copy_(merged[0])
    s.copy_(merged[1])


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (v: [T, H, D], s: f32[T, H]) over the keys of n states v: [T, n, H, D], s: f32[T, n, H]."""
    checked = GivenTensors()
    checked.check("v", v, "T n H D", FLOATS)
    checked.check("s", s, "T n H", NUMBERS)
    refuse_gradients("merge_states", v=v, s=s)
    s = s.float()
    top = s.amax(1, keepdim=True) if s.shape[1] else s.new_full((len(s), 1, s.shape[2]), -torch.inf)
    weight = torch.exp2(s - torch.where(top.isinf(), 0.0, top))
    total = weight.sum(1)
    share = weight / torch.where(total == 0, 1.0, total)[:, None]
    parts = torch.where(share[..., None] == 0, 0.0, v.float() * share[..., None])
    return parts.sum(1).to(v.dtype), top[:, 0] + torch.log2(total)


class MultiLevelCascadeAttentionWrapper:
    """Attends against pages at several levels: a request of the first level is a prefix that all of its
    queries share, and the last level has what each has alone.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[torch.Tensor] | None = None,
    ) -> None:
        levels = check_integer("num_levels", num_levels, 1)
        buffers: dict[str, Sequence[Any]] = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr or [None] * levels,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr or [None] * levels,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr or [None] * levels,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr or [None] * levels,
        }
        _check_levels(levels, **buffers)
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *of_level)
            for of_level in zip(*buffers.values(), strict=True)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._levels[0].is_cuda_graph_enabled

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor]
    ) -> None:
        """Takes other workspaces, of which nothing is used."""

    def plan(
        self,
        qo_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Takes the tables of each level, as `BatchPrefillWithPagedKVCacheWrapper.plan` does; causal is of
        the last one alone.

        ValueError names what is not supported: windows and ALiBi, which would count from the end of each
        level, not of the whole.
        """
        levels = len(self._levels)
        _check_levels(
            levels,
            qo_indptr_arr=qo_indptr_arr,
            paged_kv_indptr_arr=paged_kv_indptr_arr,
            paged_kv_indices_arr=paged_kv_indices_arr,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        if levels > 1 and (window_left >= 0 or pos_encoding_mode != "NONE"):
            name = "window_left" if window_left >= 0 else "pos_encoding_mode"
            value = window_left if window_left >= 0 else pos_encoding_mode
            raise ValueError(
                f"plan: {name}: expected {-1 if window_left >= 0 else 'NONE'!r} with several levels, each of"
                f" which would count from its own end, got {value!r}"
            )
        tables = zip(
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, strict=True
        )
        for number, (level, csr) in enumerate(zip(self._levels, tables, strict=True), 1):
            level.plan(
                csr[0],
                csr[1],
                csr[2],
                csr[3],
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and number == levels,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: Cache) -> torch.Tensor:
        """Returns o: [T, Hq, D] of q: [T, Hq, D] over the keys of all levels."""
        o, lse = self._levels[-1].run_return_lse(q, paged_kv_cache)
        for level in self._levels[:-1]:
            o, lse = merge_state(o, lse, *level.run_return_lse(q, paged_kv_cache))
        return o

    forward = run

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Decodes against a prefix that all requests share, an ordinary tensor, and pages of each."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._alone = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any) -> None:
        """Takes other workspaces, of which nothing is used."""

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DType = "float16",
    ) -> None:
        """Takes the tables of the pages, as `BatchDecodeWithPagedKVCacheWrapper.plan` does."""
        self._alone.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=data_type,
        )

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: Cache
    ) -> torch.Tensor:
        """Returns o: [B, Hq, D] of q: [B, Hq, D]; k_shared, v_shared: [N, Hkv, D], or [Hkv, N, D]."""
        shared = single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=self._layout, return_lse=True)
        return merge_state(*shared, *self._alone.run_return_lse(q, unique_kv_cache))[0]

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Prefills against a prefix that all requests share, an ordinary tensor, and pages of each."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._alone = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._layout = kv_layout
        self._tables: tuple[Any, ...] | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any) -> None:
        """Takes other workspaces, of which nothing is used."""

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Takes the tables of the pages, as `BatchPrefillWithPagedKVCacheWrapper.plan` does."""
        tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._tables = (*tables, num_qo_heads, num_kv_heads, head_dim, page_size)
        self._form: tuple[Any, ...] | None = None

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Cache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Returns o: [T, Hq, D] of q: [T, Hq, D]; k_shared, v_shared: [N, Hkv, D], or [Hkv, N, D], which all
        queries see; causal is of the pages.
        """
        if self._tables is None:
            raise RuntimeError("forward: expected a call of begin_forward() before")
        form = (causal, sm_scale, rope_scale, rope_theta, q.dtype)
        if form != self._form:
            qo, indptr, indices, last, heads, shared, size, page = self._tables
            self._alone.plan(
                qo,
                indptr,
                indices,
                last,
                heads,
                shared,
                size,
                page,
                causal=causal,
                sm_scale=sm_scale,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q.dtype,
            )
            self._form = form
        prefix = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._layout, sm_scale=sm_scale, return_lse=True
        )
        return merge_state(*prefix, *self._alone.run_return_lse(q, unique_kv_cache))[0]

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""


def _check_levels(levels: int, **given: Sequence[Any]) -> None:
    for name, tensors in given.items():
        if len(tensors) != levels:
            raise ValueError(f"{name}: expected a tensor for each of {levels} levels, got {len(tensors)}")


def _check(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> None:
    checked = GivenTensors()
    checked.check("v_a", v_a, "T H D", FLOATS)
    checked.check("v_b", v_b, "T H D", (v_a.dtype,), "like v_a")
    for name, s in (("s_a", s_a), ("s_b", s_b)):
        checked.check(name, s, "T H", NUMBERS)
    refuse_gradients("merge_state", v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
