"""How much memory a search takes at several page sizes: caches that follow a decoder and hold no keys.

The measures are those of PagedAttention (Kwon et al. 2023, arXiv 2309.06180): waste is the share of the held
memory without a token in it; saved is the share of pages that sharing saves (section 6.3), the mean over
all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from attnc.paging import PagedCache, Statistics
from examples.llama_paged import PAGE, PagedDecoder

#: Of these the decoder itself has the first.
PAGE_SIZES = (PAGE, 8, 4, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The statistics of one page size after every step."""

    page: int
    seen: list[Statistics] = field(default_factory=list)

    @property
    def waste(self) -> float:
        """Mean share of the held rows without a token."""
        return 1 - sum(s.stored for s in self.seen) / sum(s.held * s.page for s in self.seen)

    @property
    def saved(self) -> float:
        """Mean share of pages that sharing saves."""
        return sum(s.saved for s in self.seen) / len(self.seen)

    def reserved(self, length: int, sequences: int) -> float:
        """Mean waste if each sequence had a contiguous piece of `length` tokens."""
        return 1 - sum(s.tokens for s in self.seen) / (length * sequences * len(self.seen))


class Metered:
    """The decoder, and beside it what its sequences would hold in pages of other sizes."""

    def __init__(self, decoder: PagedDecoder) -> None:
        self.decoder = decoder
        real = decoder.cache
        rows = len(real.kv_len)
        self.caches = [
            PagedCache(
                pages=rows * -(-real.max_length // page),
                page=page,
                kv_heads=1,
                head_dim=1,
                v_head_dim=0,
                sequences=rows,
                max_length=real.max_length,
            )
            for page in PAGE_SIZES
        ]
        self.numbers: dict[int, list[int]] = {}  # of a sequence, in each of the caches
        self.memory = self.start()

    def start(self) -> list[Memory]:
        """Begins anew: what is returned grows with every `watch`."""
        self.memory = [Memory(page=page) for page in PAGE_SIZES]
        return self.memory

    def watch(self) -> None:
        """Notes how full the pages of each size are now."""
        for cache, memory in zip(self.caches, self.memory, strict=True):
            memory.seen.append(cache.statistics())
        ours, real = self.memory[0].seen[-1], self.decoder.cache.statistics()
        assert (ours.held, ours.stored, ours.alone) == (real.held, real.stored, real.alone)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        """As the decoder's."""
        sequences, logits = self.decoder.prefill(prompts)
        for sequence in sequences:
            self.numbers[sequence] = [cache.allocate() for cache in self.caches]
        self._append(sequences, [len(prompt) for prompt in prompts])
        return sequences, logits

    def step(self, sequences: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """As the decoder's."""
        logits = self.decoder.step(sequences, tokens)
        self._append(sequences, [1] * len(sequences))
        return logits

    def fork(self, sequence: int) -> int:
        """As the decoder's."""
        child = self.decoder.fork(sequence)
        parents = zip(self.caches, self.numbers[sequence], strict=True)
        self.numbers[child] = [cache.fork(number) for cache, number in parents]
        return child

    def free(self, sequences: Sequence[int]) -> None:
        """As the decoder's."""
        self.decoder.free(sequences)
        for sequence in sequences:
            for cache, number in zip(self.caches, self.numbers.pop(sequence), strict=True):
                cache.free(number)

    def _append(self, sequences: Sequence[int], counts: list[int]) -> None:
        for index, cache in enumerate(self.caches):
            cache.append([self.numbers[sequence][index] for sequence in sequences], counts)
