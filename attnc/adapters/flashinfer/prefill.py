"""Any number of queries per sequence against its pages, packed end to end."""

from __future__ import annotations

import torch

from attnc.adapters.flashinfer.wrapper import DType, PagedWrapper, Pages, Plan, dtype_planned
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
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            **unsupported,
        )
        if pos_encoding_mode != "NONE":
            raise ValueError(f"plan: pos_encoding_mode: expected 'NONE', got {pos_encoding_mode!r}")
        if head_dim_vo not in (None, head_dim_qk):
            raise ValueError(
                f"plan: head_dim_vo: expected {head_dim_qk}, like head_dim_qk, got {head_dim_vo}"
            )
        before = f"q_pos - {window_left} <= kv_idx" if window_left >= 0 else "true"
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
            mask=f"{before} and causal" if causal else before,
            softcap=float(logits_soft_cap or 0.0),
        )
        tables = Pages(
            indptr=paged_kv_indptr,
            indices=paged_kv_indices,
            last_page_len=paged_kv_last_page_len,
            page=page_size,
        )
        self._keep(wanted, tables, (num_qo_heads, num_kv_heads), window_left)
        self._qo_indptr = qo_indptr.to(self._device, torch.int32)

    def _launch(
        self,
        plan: Plan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Queries lie end to end, as the kernel takes them."""
        plan.kernel(q, k, v, self._qo_indptr, plan.block_table, plan.kv_len, out=(o, lse))
