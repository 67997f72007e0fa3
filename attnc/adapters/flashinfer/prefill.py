"""Any number of queries per sequence against its pages, packed end to end."""

from __future__ import annotations

import torch

from attnc.adapters.flashinfer.wrapper import (
    QKV,
    DType,
    PagedWrapper,
    Pages,
    Plan,
    dtype_planned,
    refuse_rotation,
)
from attnc.adapters.specs import Wanted, refuse


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
        wanted = Wanted(
            name="batch_prefill",
            dtype=dtype_planned(q_data_type, kv_data_type, o_data_type),
            head_dim=head_dim_qk,
            scale=head_dim_qk**-0.5 if sm_scale is None else float(sm_scale),
            q="[T, Hkv * G, D] via ragged(qo_indptr)",
            kv=self._kv_shape(page_size),
            o="[T, Hkv * G, D]",
            lse="[T, Hkv * G]",
            inputs=("qo_indptr: i32[B + 1]", "block_table: i32[B, P]", "kv_len: i32[B]"),
            length="kv_len",
            mask=_mask(causal, window_left),
            softcap=float(logits_soft_cap or 0.0),
        )
        tables = Pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._keep(wanted, tables, (num_qo_heads, num_kv_heads), window_left)
        self._qo_indptr = qo_indptr.to(self._device, torch.int32)

    def _launch(self, plan: Plan, qkv: QKV, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Queries lie end to end, as the kernel takes them."""
        plan.kernel(*qkv, self._qo_indptr, plan.block_table, plan.kv_len, out=out)


def _check_head_dims(qk: int, vo: int | None) -> None:
    if vo not in (None, qk):
        raise ValueError(f"plan: head_dim_vo: expected {qk}, like head_dim_qk, got {vo}")


def _mask(causal: bool, window_left: int) -> str:
    """Writes the mask in the language; a window bounds the keys before a query alone."""
    before = f"q_pos - {window_left} <= kv_idx" if window_left >= 0 else "true"
    return f"{before} and causal" if causal else before
