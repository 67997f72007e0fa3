"""Greedy decoding, parallel sampling and beam search over a decoder, which may have pages or not.

What a search keeps, it forks; what it drops, it frees. With pages a fork costs no memory until texts differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Decoder(Protocol):
    """What a search needs of a model."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]: ...
    def step(self, sequences: Sequence[int], tokens: Sequence[int]) -> torch.Tensor: ...
    def fork(self, sequence: int) -> int: ...
    def free(self, sequences: Sequence[int]) -> None: ...


def ignore() -> None:
    """Watches nothing."""


def greedy(
    decoder: Decoder, prompts: Sequence[Sequence[int]], steps: int, watch: Callable[[], None] = ignore
) -> list[list[int]]:
    """`steps` tokens after each prompt, each the most likely. `watch` is called after every step."""
    sequences, logits = decoder.prefill(prompts)
    tokens = [logits.argmax(1).tolist()]
    for _ in range(steps - 1):
        logits = decoder.step(sequences, tokens[-1])
        tokens.append(logits.argmax(1).tolist())
        watch()
    decoder.free(sequences)
    return [list(column) for column in zip(*tokens, strict=True)]


def sample(
    decoder: Decoder,
    prompt: Sequence[int],
    steps: int,
    count: int,
    seed: int = 0,
    watch: Callable[[], None] = ignore,
) -> list[list[int]]:
    """`count` continuations of one prompt, drawn at temperature 1; the same for the same seed."""
    (parent,), logits = decoder.prefill([prompt])
    sequences = [parent, *(decoder.fork(parent) for _ in range(count - 1))]
    generator = torch.Generator().manual_seed(seed)
    logits = logits.expand(count, -1)
    tokens: list[list[int]] = []
    for index in range(steps):
        if index:
            logits = decoder.step(sequences, tokens[-1])
            watch()
        # argmax(logits + Gumbel noise) is a draw from the softmax
        noise = torch.rand(logits.shape, generator=generator).clamp(min=1e-20)
        tokens.append((logits - torch.log(-torch.log(noise)).to(logits.device)).argmax(1).tolist())
    decoder.free(sequences)
    return [list(column) for column in zip(*tokens, strict=True)]


def beam_search(
    decoder: Decoder, prompt: Sequence[int], steps: int, width: int, watch: Callable[[], None] = ignore
) -> list[list[int]]:
    """The `width` likeliest continuations that the search finds, best first."""
    (parent,), logits = decoder.prefill([prompt])
    score = torch.zeros(1, device=logits.device)
    sequences: list[int] = [parent]
    beams: list[list[int]] = [[]]
    for index in range(steps):
        total = score[:, None] + logits.log_softmax(1)
        score, chosen = total.flatten().topk(width)
        parents, tokens = (chosen // logits.shape[1]).tolist(), (chosen % logits.shape[1]).tolist()
        beams = [[*beams[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        sequences = continued(decoder, sequences, parents)
        if index < steps - 1:
            logits = decoder.step(sequences, tokens)
            watch()
    decoder.free(sequences)
    return beams


def continued(decoder: Decoder, sequences: Sequence[int], parents: Sequence[int]) -> list[int]:
    """A sequence for each parent: itself the first time, then a fork. Those that are no parent are freed."""
    decoder.free([sequence for index, sequence in enumerate(sequences) if index not in parents])
    made: list[int] = []
    for place, parent in enumerate(parents):
        again = parent in parents[:place]
        made.append(decoder.fork(sequences[parent]) if again else sequences[parent])
    return made
