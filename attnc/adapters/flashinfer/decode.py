"""One query per sequence against its pages."""

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


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """One query per sequence against its pages. Of the workspace buffer only the device is used.

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
        wanted = Wanted(
            name="batch_decode",
            dtype=dtype_planned(data_type or q_data_type, kv_data_type, o_data_type),
            head_dim=head_dim,
            scale=head_dim**-0.5 if sm_scale is None else float(sm_scale),
            q="[B, M, Hkv * G, D]",
            kv=self._kv_shape(page_size),
            o="[B, M, Hkv * G, D]",
            lse="[B, M, Hkv * G]",
            inputs=("block_table: i32[B, P]", "kv_len: i32[B]"),
            length="kv_len",
            mask="causal" if window_left < 0 else f"window({window_left}, 0)",
            softcap=float(logits_soft_cap or 0.0),
            decode=True,
            split=not disable_split_kv,
            split_size=split_size,
        )
        tables = Pages(indptr, indices, last_page_len, page_size)
        self._keep(wanted, tables, (num_qo_heads, num_kv_heads), window_left)

    def _launch(self, plan: Plan, qkv: QKV, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        """A sequence's one query is its row of q."""
        q, k, v = qkv
        o, lse = (x.unsqueeze(1) for x in out)
        plan.kernel(q.unsqueeze(1), k, v, plan.block_table, plan.kv_len, out=(o, lse))
