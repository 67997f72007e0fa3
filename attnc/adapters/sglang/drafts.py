"""The steps of a model that drafts: one backend each, since a graph captures all of them."""

from __future__ import annotations

from typing import Any

import torch

from attnc.adapters.sglang.backend import AttncAttnBackend, AttncMetadata


class AttncMultiStepDraftBackend:
    """attnc to SGLang, for drafts of several steps and `topk` branches of each request.

    Branches of a request share its prefix, and each has slots of its own behind it: a row of pages for each
    branch, of one slot where there are several. All steps read these, with a key more in each.
    """

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        """Raises ValueError for a model, or a way to run it, that the kernels do not compute."""
        if topk > 1 and model_runner.page_size > 1:
            raise ValueError(
                f"page_size: expected 1, as drafts have {topk} branches, got {model_runner.page_size}"
            )
        self.topk = topk
        self.steps = speculative_num_steps
        self.attn_backends = [AttncAttnBackend(model_runner) for _ in range(speculative_num_steps - 1)]
        self.req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self.page: int = model_runner.page_size
        self.device = model_runner.device
        self.max_context_len: int = model_runner.model_config.context_len
        self._captured: list[AttncMetadata] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes the metadata of all steps, where no graph captures them."""
        rows = forward_batch.batch_size * self.topk
        self._hand_out(self._make_metadata(rows), forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._captured = self._make_metadata(max_bs * self.topk)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Brings the tensors of a graph up to date before it is captured or replayed. Waits for nothing."""
        assert self._captured, "init_cuda_graph_state comes first"
        self._hand_out(self._captured, forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Does nothing: all metadata is made in front of a graph."""

    def _make_metadata(self, rows: int) -> list[AttncMetadata]:
        pages = -(-self.req_to_token.shape[1] // self.page)
        table = torch.zeros(rows, pages, dtype=torch.int32, device=self.device)
        ends = torch.zeros(rows + 1, dtype=torch.int32, device=self.device)
        return [
            AttncMetadata(1, self.page, ends, torch.ones_like(ends[1:]), table) for _ in self.attn_backends
        ]

    def _hand_out(self, steps: list[AttncMetadata], batch: Any) -> None:
        rows = batch.batch_size * self.topk
        if not steps:
            return
        table = steps[0].page_table[:rows]
        table.copy_(self._pages(batch, table.shape[1]))
        lengths = batch.seq_lens.repeat_interleave(self.topk)
        for step, (backend, kept) in enumerate(zip(self.attn_backends, steps, strict=True)):
            seq_lens = kept.seq_lens[:rows]
            seq_lens.copy_(lengths + step + 1)
            backend.forward_metadata = AttncMetadata(
                1, self.page, kept.cu_seqlens_q[: rows + 1], seq_lens, table
            )

    def _pages(self, batch: Any, pages: int) -> torch.Tensor:
        requests = batch.req_pool_indices
        if self.topk == 1:
            slots = self.req_to_token[requests, : pages * self.page : self.page]
            return slots if self.page == 1 else slots // self.page
        at = torch.arange(pages, device=self.device).expand(len(requests), self.topk, pages)
        first = torch.arange(self.topk, device=self.device)[:, None] * self.steps
        at = torch.where(at < batch.seq_lens[:, None, None], at, at + first).clamp(max=pages - 1)
        return self.req_to_token[requests[:, None, None], at].flatten(0, 1)
