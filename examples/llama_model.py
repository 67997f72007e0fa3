"""A Llama with random weights in plain torch, its attention left open, and a decoder without pages.

Tokens of all sequences lie end to end: x is [T, hidden]. What a sequence is, only the attention knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn.functional import linear, rms_norm, silu

#: (layer, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> o [T, H, D]
Attend: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a model; kv_heads < heads is grouped-query attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int


TINY = Sizes(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=48, vocab=67)
ONE_BILLION = Sizes(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=128, mlp=5632, vocab=32000)


class Llama:
    """Rotary positions, RMS norms, a gated MLP; weights are drawn from a seed."""

    def __init__(self, sizes: Sizes, *, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def drawn(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            weight = torch.randn(rows, columns, generator=generator, device=device)
            return weight.mul_(gain / columns**0.5).to(dtype)

        self.sizes, self.dtype, self.device = sizes, dtype, torch.device(device)
        rows = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.embedding = drawn(sizes.vocab, sizes.hidden, sizes.hidden**0.5)
        self.head = drawn(sizes.vocab, sizes.hidden)
        self.layers = [
            {
                "q": drawn(rows[0], sizes.hidden, 2.0),
                "k": drawn(rows[1], sizes.hidden, 2.0),
                "v": drawn(rows[1], sizes.hidden),
                "o": drawn(sizes.hidden, rows[0]),
                "gate": drawn(sizes.mlp, sizes.hidden),
                "up": drawn(sizes.mlp, sizes.hidden),
                "down": drawn(sizes.hidden, sizes.mlp),
            }
            for _ in range(sizes.layers)
        ]
        half = torch.arange(0, sizes.head_dim, 2, device=device) / sizes.head_dim
        self.frequencies = 10000.0**-half

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, layers: int | None = None
    ) -> torch.Tensor:
        """[T, hidden] of tokens and their positions, both i64[T], after the first `layers`, or all."""
        sizes, x = self.sizes, self.embedding[tokens]
        angle = positions[:, None, None] * self.frequencies
        cos, sin = angle.cos(), angle.sin()
        for index, layer in enumerate(self.layers[:layers]):
            y = rms_norm(x, (sizes.hidden,), eps=1e-6)
            q, k, v = (linear(y, layer[name]).view(len(x), -1, sizes.head_dim) for name in "qkv")
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            x = x + linear(attend(index, q, k, v).flatten(1), layer["o"])
            y = rms_norm(x, (sizes.hidden,), eps=1e-6)
            x = x + linear(silu(linear(y, layer["gate"])) * linear(y, layer["up"]), layer["down"])
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """f32[rows, vocab] of rows of `hidden`."""
        return linear(rms_norm(x, (self.sizes.hidden,), eps=1e-6), self.head).float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021) of [T, heads, D]; halves are pairs."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


@dataclass(slots=True)
class _Dense:
    """The keys and values of one sequence, [N, Hkv, D] for each layer."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]


class DenseDecoder:
    """Every sequence has its keys and values to itself, and the attention is three lines of torch in f32."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.states: dict[int, _Dense] = {}
        self.next = 0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        """New sequences, and f32[B, vocab] after the last token of each."""
        sizes = self.model.sizes
        empty = torch.empty(
            0, sizes.kv_heads, sizes.head_dim, dtype=self.model.dtype, device=self.model.device
        )
        sequences = list(range(self.next, self.next + len(prompts)))
        self.next += len(prompts)
        for sequence in sequences:
            self.states[sequence] = _Dense([empty] * sizes.layers, [empty] * sizes.layers)
        return sequences, self._run(sequences, prompts)

    def step(self, sequences: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """f32[B, vocab] after one more token of each sequence."""
        return self._run(sequences, [[token] for token in tokens])

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens."""
        state, child = self.states[sequence], self.next
        self.states[child], self.next = _Dense(state.k.copy(), state.v.copy()), child + 1
        return child

    def free(self, sequences: Sequence[int]) -> None:
        """Forgets sequences."""
        for sequence in sequences:
            del self.states[sequence]

    def _run(self, sequences: Sequence[int], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        counts = [len(part) for part in tokens]
        lengths = [len(self.states[sequence].k[0]) for sequence in sequences]
        group = self.model.sizes.heads // self.model.sizes.kv_heads

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outputs = []
            parts = (torch.split(x, counts) for x in (q, k, v))
            for sequence, rows, new_k, new_v in zip(sequences, *parts, strict=True):
                state = self.states[sequence]
                state.k[layer] = torch.cat([state.k[layer], new_k])
                state.v[layer] = torch.cat([state.v[layer], new_v])
                outputs.append(dense_attention(rows, state.k[layer], state.v[layer], group))
            return torch.cat(outputs)

        flat, positions, last = place(self.model.device, tokens, lengths)
        return self.model.logits(self.model.hidden(flat, positions, attend)[last])


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: int) -> torch.Tensor:
    """Causal attention of the last M tokens [M, H, D] of a sequence against all N, [N, Hkv, D]."""
    m, n = len(q), len(k)
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    score = torch.einsum("mhd,nhd->hmn", q.float(), keys) * q.shape[-1] ** -0.5
    after = torch.ones(m, n, dtype=torch.bool, device=q.device).triu(n - m + 1)
    p = score.masked_fill(after, -torch.inf).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", p, values).to(q.dtype)


def place(
    device: torch.device, tokens: Sequence[Sequence[int]], lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, positions, rows of the last tokens), i64, of tokens that follow `lengths` earlier ones."""
    flat = [token for part in tokens for token in part]
    positions = [
        length + index for length, part in zip(lengths, tokens, strict=True) for index in range(len(part))
    ]
    last = [sum(map(len, tokens[: index + 1])) - 1 for index in range(len(tokens))]
    both = torch.tensor([flat, positions], device=device)
    return both[0], both[1], torch.tensor(last, device=device)
