"""FlashInfer's prefill of prompts with ranges that see each other in both directions, as images do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnc.adapters.flashinfer.arguments import DType, check_integer, to_dtype
from attnc.adapters.flashinfer.paged import Cache, split_cache
from attnc.adapters.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from attnc.adapters.flashinfer.wrapper import Plan, Result, check_call, launch
from attnc.adapters.specs import kernel_name, number_of, refuse
from attnc.api.tensors import GivenTensors


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The prefill of pages where a query sees the keys up to its own, and those of a range that it names."""

    _shares_tiles = False

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        o_data_type: DType | None = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        v_sf_swizzled: bool = False,
    ) -> None:
        """Types and head dimensions: those of every plan, which may leave the types out. ValueError for
        positions that are encoded inside of attention.
        """
        name = "BatchPrefillWithCausalBidirectionalRangesWrapper"
        refuse(name, v_sf_swizzled=v_sf_swizzled)
        if pos_encoding_mode != "NONE":
            raise ValueError(f"{name}: pos_encoding_mode: expected 'NONE', got {pos_encoding_mode!r}")
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )
        types = {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        types["o_data_type"] = q_data_type if o_data_type is None else o_data_type
        self._made_for: dict[str, Any] = {key: to_dtype(f"{name}: {key}", x) for key, x in types.items()}
        self._made_for |= {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo}

    def plan(  # type: ignore[override]  # FlashInfer's has other arguments, too
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
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Takes the tables of a batch, as `BatchPrefillWithPagedKVCacheWrapper.plan` does. ValueError for
        what is not as the wrapper was made, and, as in FlashInfer, for masks, windows and softcaps.
        """
        refuse("plan", custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, causal=causal)
        refuse("plan", logits_soft_cap=logits_soft_cap, use_fp16_qk_reduction=use_fp16_qk_reduction)
        given = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "o_data_type": o_data_type}
        said: dict[str, Any] = {
            name: to_dtype(f"plan: {name}", x) for name, x in given.items() if x is not None
        }
        said |= {"head_dim_qk": head_dim_qk}
        said |= {} if head_dim_vo is None else {"head_dim_vo": head_dim_vo}
        wanted = self._made_for | {"window_left": -1, "pos_encoding_mode": "NONE"}
        for name, x in (said | {"window_left": window_left, "pos_encoding_mode": pos_encoding_mode}).items():
            if x != wanted[name]:
                raise ValueError(f"plan: {name}: expected {wanted[name]}, as the wrapper was made, got {x}")
        super().plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            page_size=page_size,
            sm_scale=sm_scale,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr,
            **self._made_for,
        )

    begin_forward = plan  # type: ignore[assignment]  # as above

    def run(  # type: ignore[override]  # as above
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: object = None,
    ) -> Result:
        """Returns o: [T, Hq, Dv], and with return_lse lse: f32[T, Hq] in base 2, as the prefill does.

        bidirectional_ranges: i32[T, 2], contiguous: the first and the last key of the range of each query,
        counted in its request; (-1, -1) for none. causal_window_left: keys before a query that it sees beside
        its own, -1 for all; range_window_left: keys of the range back from its own, that one included, 0 or
        -1 for all. A new window compiles once. No tile of keys is skipped. ValueError or TypeError names an
        argument.
        """
        plan = self._plan_of_run()
        refuse("run", kv_cache_sf=kv_cache_sf)
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        for name, scale in scales.items():
            number_of(f"run: {name}", scale, 1.0)
        left = check_integer("run: causal_window_left", causal_window_left, -1 << 31)
        reach = check_integer("run: range_window_left", range_window_left, -1 << 31)
        k, v = map(self._with_a_page, split_cache(paged_kv_cache))
        heads_at = 2 if self._layout == "NHD" else 1

        def check() -> None:
            check_call(plan, q, k, v, heads_at, "paged_kv_cache")
            given = GivenTensors("run")
            given.check("q", q, q.shape, (q.dtype,))
            given.check("bidirectional_ranges", bidirectional_ranges, [len(q), 2], (torch.int32,))
            if not bidirectional_ranges.is_contiguous():
                came = f"got strides {bidirectional_ranges.stride()}"
                raise ValueError(f"run: bidirectional_ranges: expected a contiguous tensor, {came}")

        return launch(
            self._derive((left, reach), lambda plan: _add_ranges(plan, left, reach)),
            {"q": q, "k": k, "v": v, "ranges": bidirectional_ranges},
            **scales,
            out=out,
            lse=lse,
            return_lse=return_lse,
            check=check,
        )


def _add_ranges(plan: Plan, left: int, reach: int) -> Plan:
    inputs = *plan.wanted.inputs, "ranges: i32[T, 2]"
    wanted = replace(plan.wanted, inputs=inputs, mask=_write(left, reach))
    return replace(plan, wanted=wanted, made=kernel_name(wanted))


def _write(left: int, reach: int) -> str:
    """Writes the mask in the language."""
    first, last = (f"ranges[qo_indptr[b] + q_idx, {column}]" for column in (0, 1))
    causal = "causal" + (f" and q_pos - {left} <= kv_idx" if left >= 0 else "")
    ranged = f"{first} <= kv_idx and kv_idx <= {last}" + (
        f" and q_pos - {reach} < kv_idx" if reach > 0 else ""
    )
    return f"({causal}) or ({ranged})"
