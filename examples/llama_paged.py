"""The same decoder over pages: generated kernels, and attnc.paging to say where keys and values lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from attnc.paging import CacheFull, PagedCache, Step
from examples.llama_model import Llama, place

PAGE = 16


def kernels(dtype: torch.dtype, head_dim: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(prefill, decode): in bf16 those of generated/, in f32 those of examples/llama.attn, compiled here."""
    if dtype == torch.bfloat16:
        names = ("chunked_prefill", "paged_decode")
        prefill, decode = (getattr(import_module(f"generated.{name}.triton"), name) for name in names)
        return prefill, decode
    from attnc.build import front, plan_program
    from attnc.runtime.loader import load_module

    made = {}
    for module in plan_program(front(Path(__file__).with_name("llama.attn"))).modules:
        if module.variant.params["D"] == head_dim:
            name = module.variant.attention.name
            made[name] = getattr(load_module(module), name)
    return made["llama_prefill"], made["llama_decode"]


def first(result: Any) -> torch.Tensor:
    """o of a kernel that returns o, or (o, lse)."""
    o: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return o


class PagedDecoder:
    """As DenseDecoder; `cache` has room for `pages` pages, shared by at most `sequences` sequences."""

    def __init__(self, model: Llama, *, pages: int, sequences: int, max_length: int) -> None:
        sizes = model.sizes
        self.model = model
        self.cache = PagedCache(
            pages=pages,
            page=PAGE,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            sequences=sequences,
            max_length=max_length,
            layers=sizes.layers,
            dtype=model.dtype,
            device=model.device,
        )
        self.kernels = kernels(model.dtype, sizes.head_dim)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        """New sequences, and f32[B, vocab] after the last token of each. CacheFull: nothing was changed."""
        sequences: list[int] = []
        try:
            sequences += (self.cache.allocate() for _ in prompts)
            return sequences, self._run(sequences, prompts)
        except CacheFull:
            self.cache.free(*sequences)
            raise

    def step(self, sequences: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """f32[B, vocab] after one more token of each sequence. OutOfPages: nothing was changed."""
        return self._run(sequences, [[token] for token in tokens])

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, in the same pages."""
        return self.cache.fork(sequence)

    def free(self, sequences: Sequence[int]) -> None:
        """Gives the pages of sequences back."""
        self.cache.free(*sequences)

    def _run(self, sequences: Sequence[int], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        lengths = [self.cache.length(sequence) for sequence in sequences]
        step = self.cache.append(sequences, [len(part) for part in tokens])
        decode = all(len(part) == 1 for part in tokens)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.cache.write(step.slots, k, v, layer)
            return self.attention(layer, q, step, decode)

        flat, positions, last = place(self.model.device, tokens, lengths)
        return self.model.logits(self.model.hidden(flat, positions, attend)[last])

    def attention(self, layer: int, q: torch.Tensor, step: Step, decode: bool) -> torch.Tensor:
        """o [T, H, D] of the step's tokens against all keys of their sequences."""
        k, v = self.cache.k(layer), self.cache.v(layer)
        if decode:
            return first(self.kernels[1](q.unsqueeze(1), k, v, step.block_table, step.kv_len)).squeeze(1)
        return first(self.kernels[0](q, k, v, step.cu_q, step.block_table, step.kv_len))
