"""Random mods and calls, as text that runs on torch's values and on ours.

A draw is a program of two mods (either may be missing), captured tensors of all types and ranks, a mask given
as a mask_mod or as a BlockMask, and the sizes and strides of a call. Expressions have types, so that torch
computes each: nothing divides by zero, leaves a table, or has no number. What real bugs were about is drawn
often: minus infinity in sums and extrema, conditions on scores, negative indices and divisors, integers of
8 bits, numbers of conditions.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

Mod = Callable[..., Any]
#: Captured tensors: their shapes by the names of sizes, and types; those that begin with "w" get gradients.
TABLES: dict[str, tuple[str, torch.dtype]] = {
    "doc": ("N", torch.int32), "ids": ("N", torch.int64), "small": ("N", torch.uint8),
    "signed": ("N", torch.int8), "kept": ("N", torch.bool), "pairs": ("HT", torch.bool),
    "count": ("B", torch.int32), "one": ("", torch.int32),
    "bias": ("HT", torch.float32), "half": ("N", torch.float16), "wide": ("BN", torch.float64),
    "weight": ("H", torch.float32), "weights": ("BHT", torch.float32), "warm": ("", torch.float32),
}  # fmt: skip


class Words:
    """Draws expressions. deep: how many operations may still be nested.

    chains: whether tensors are indexed in steps, bias[h][kv], beside which no gradients are asked for
    """

    def __init__(self, seed: int, sizes: dict[str, int]) -> None:
        self.random = random.Random(seed)
        self.sizes = sizes
        self.chains = self.random.random() < 0.3

    def one_of(self, *options: str) -> str:
        return self.random.choice(options)

    def position(self) -> str:
        """An index of a table of N elements that may be negative."""
        N = self.sizes["N"]
        return self.one_of(
            "q",
            "kv",
            "kv",
            f"(q - kv) % {N}",
            f"-1 - kv % {N}",
            f"torch.clamp(kv - q, -{N}, {N - 1})",
            "(q + kv) // 2",
        )

    def load(self, name: str) -> str:
        axes = {
            "B": self.one_of("b", "b", "0", "-1"),
            "H": self.one_of("h", "h", "0", "-h - 1"),
            "N": self.position(),
            "T": self.position(),
        }
        indices = [axes[axis] for axis in TABLES[name][0]]
        if not indices:
            return name
        joined = ", ".join(indices) if not self.chains or self.random.random() < 0.5 else "][".join(indices)
        return f"{name}[{joined}]" + (".float()" if name == "half" else "")  # torch computes in 16 bits

    def integer(self, deep: int) -> str:
        if deep == 0 or self.random.random() < 0.15:
            return self.one_of(
                "q",
                "kv",
                "h",
                "b",
                "(q - kv)",
                *map(self.load, ("doc", "ids", "small", "signed", "count", "one")),
            )
        x, y = self.integer(deep - 1), self.integer(deep - 1)
        number = self.random.choice((1, 2, 3, 5, 7))
        wide = f"({x} + 0 * kv)"  # torch makes 247 of -9 beside 8 bits without a sign
        return self.one_of(
            f"({x} + {y})",
            f"({x} - {y})",
            f"({x} * {number})",
            f"({x} // {number})",
            f"({wide} // -{number})",
            f"({x} % {number})",
            f"({wide} % -{number})",
            f"torch.minimum({x}, {y})",
            f"torch.maximum({x}, {y})",
            f"torch.abs({x})",
            f"torch.where({self.condition(deep - 1)}, {x}, {y})",
            f"(-{x})",
            f"{x}.clamp(min={number})",
            f"({self.condition(deep - 1)}).int()",
            f"torch.sign({x})",
            f"(torch.abs({x}) >> 1)",
            f"torch.clamp({wide}, -{number}, {number})",
        )

    def condition(self, deep: int) -> str:
        if deep == 0 or self.random.random() < 0.15:
            return self.one_of(
                "(q >= kv)",
                "(q - kv < 9)",
                "(kv < 20)",
                "(h % 2 == 0)",
                "(doc[q] == doc[kv])",
                *map(self.load, ("kept", "pairs")),
            )
        x, y = self.condition(deep - 1), self.condition(deep - 1)
        compared = self.one_of("<", "<=", ">", ">=", "==", "!=")
        return self.one_of(
            f"({x} & {y})",
            f"({x} | {y})",
            f"(~{x})",
            f"({x} ^ {y})",
            f"({x} == {y})",
            f"({x} + {y})",
            f"({x} * {y})",
            f"({self.integer(deep - 1)} {compared} {self.integer(deep - 1)})",
            f"torch.logical_and({x}, {y})",
            f"({self.integer(deep - 1)} + 0 * kv {compared} {self.random.randrange(-9, 30)})",
            f"torch.where({x}, {y}, {self.condition(deep - 1)})",
            f"torch.logical_not({x})",
        )

    def number(self, deep: int, scored: bool) -> str:
        """A finite float. scored: whether it may read the score."""
        if deep == 0 or self.random.random() < 0.1:
            learned = () if self.chains else ("weight", "weights", "warm")
            loads = map(self.load, ("bias", "half", "wide", *learned))
            return self.one_of(
                "torch.tensor(0.5)", "(kv * 0 - 1.25)", *loads, *(["score"] * 6 if scored else [])
            )
        x, y = self.number(deep - 1, scored), self.number(deep - 1, scored)
        integer, condition = self.integer(deep - 1), self.condition(deep - 1)
        return self.one_of(
            f"({x} + {y})",
            f"({x} - {y})",
            f"({x} * {self.random.choice((0.5, -0.25, 1.5))})",
            f"({x} / 4)",
            f"(torch.tanh({x}) * {y})",
            f"torch.sigmoid({x})",
            f"torch.sin({x})",
            f"torch.cos({x})",
            f"torch.exp(-torch.abs({x}))",
            f"torch.log1p(torch.abs({x}))",
            f"torch.sqrt(1 + {x} * {x})",
            f"torch.where({condition}, {x}, {y})",
            f"({x} + ({integer}) % 5)",
            f"({x} - 0.125 * torch.clamp({integer} + 0 * kv, -8, 8))",
            f"torch.maximum({x}, {y})",
            f"torch.minimum({x}, {y})",
            f"({x} + ({condition}))",
            f"({x} * ({condition}))",
            f"torch.relu({x})",
            f"{x}.masked_fill({condition}, 0.75)",
            f"({x} / (2 + torch.abs({y})))",
            f"torch.nn.functional.softplus({x})",
        )

    def score(self, deep: int) -> str:
        """A score, which may be minus infinity."""
        if deep == 0 or self.random.random() < 0.3:
            return f"(score + {self.number(2, True)})" if self.random.random() < 0.8 else self.number(3, True)
        x, y, condition = self.score(deep - 1), self.score(deep - 1), self.condition(2)
        return self.one_of(
            f"torch.where({condition}, {x}, -torch.inf)",
            f"torch.where({condition}, -torch.inf, {x})",
            f"torch.where({condition}, {x}, {y})",
            f"({x} + torch.where({condition}, 0.0, -torch.inf))",
            f"({x}).masked_fill({condition}, -torch.inf)",
            f"torch.maximum({x}, torch.tensor(-torch.inf))",
            f"torch.minimum({x}, torch.where({condition}, 40.0, -torch.inf))",
            f"({x} / 2 - {self.number(1, False)})",
            f"torch.where(score < 0.7, {x}, -torch.inf)",
            f"torch.where((score > -0.6) | {condition}, {x}, {y})",
        )


@dataclass(frozen=True)
class Draw:
    """A call. score, mask: the text of what mods return, "" for none; learned: captured tensors with
    gradients; oracle_mask: the mask_mod that means what mask and blocks do.
    """

    score: str
    mask: str
    score_mod: Mod | None
    mask_mod: Mod | None
    block_mask: BlockMask | None
    oracle_mask: Mod | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    learned: list[torch.Tensor]
    options: dict[str, Any]

    def __repr__(self) -> str:
        sizes = [list(x.shape) for x in (self.q, self.k, self.v)]
        blocks = "" if self.block_mask is None else ", by blocks"
        return f"score: {self.score}\nmask: {self.mask}{blocks}\nsizes: {sizes}, {self.options}"


def drawn(seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Draw:
    """Returns the call of a seed."""
    rng = random.Random(seed)
    N = rng.choice((17, 33, 48))
    group = rng.choice((1, 1, 2))
    sizes = {"B": rng.choice((1, 2)), "H": 2 * group, "N": N, "T": N}
    M = N if rng.random() < 0.7 else rng.randrange(1, N)
    words = Words(seed, sizes)
    generator = torch.Generator().manual_seed(seed)
    names, learned = _tables(sizes, generator, device)
    score = words.score(2) if rng.random() < 0.8 else ""
    mask = words.condition(3) if not score or rng.random() < 0.6 else ""
    score_mod = _mod("score, b, h, q, kv", score, names)
    mask_mod = _mod("b, h, q, kv", mask, names)
    block_mask, oracle_mask = _blocks(rng, mask_mod, sizes, M, device)
    width, value_width = rng.choice((16, 16, 24)), rng.choice((16, 16, 8))
    order = rng.choice(((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 1, 3, 2)))

    def tensor(*shape: int) -> torch.Tensor:
        stored = torch.randn([shape[axis] for axis in order], generator=generator).to(device, dtype)
        return stored.permute([order.index(axis) for axis in range(4)]).requires_grad_()

    return Draw(
        score, mask, score_mod, None if block_mask is not None else mask_mod, block_mask, oracle_mask,
        tensor(sizes["B"], sizes["H"], M, width),
        tensor(sizes["B"], sizes["H"] // group, N, width),
        tensor(sizes["B"], sizes["H"] // group, N, value_width),
        [x for name, x in learned.items() if re.search(rf"\b{name}\b", score)],
        {"enable_gqa": group > 1, "scale": rng.choice((None, None, 0.3))},
    )  # fmt: skip


def _tables(
    sizes: dict[str, int], generator: torch.Generator, device: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    names: dict[str, Any] = {"torch": torch}
    learned = {}
    for name, (axes, dtype) in TABLES.items():
        shape = [sizes[axis] for axis in axes]
        if dtype.is_floating_point:
            made = torch.randn(shape, generator=generator)
        else:
            low, high = (-3, 4) if dtype in (torch.int8, torch.int64) else (0, 7)
            made = torch.randint(low, high, shape, generator=generator)
        if dtype is torch.bool:
            made = made > 1
        if name == "doc":
            made = made.sort().values
        names[name] = made.to(device, dtype)
        if name.startswith("w") and name != "wide":
            learned[name] = names[name].requires_grad_()
    return names, learned


def _mod(parameters: str, text: str, names: dict[str, Any]) -> Mod | None:
    if not text:
        return None
    space = dict(names)
    exec(f"def mod({parameters}):\n    return {text}\n", space)
    made: Mod = space["mod"]
    return made


def _blocks(
    rng: random.Random, mask_mod: Mod | None, sizes: dict[str, int], M: int, device: str
) -> tuple[BlockMask | None, Mod | None]:
    """Returns a BlockMask, or None, and the mask_mod that means the same as it and the mask."""
    kind = rng.choice(("mod", "mod", "made", "listed"))
    N = sizes["N"]
    if kind == "mod" or (kind == "made" and mask_mod is None):
        return None, mask_mod
    outer = [rng.choice((1, sizes[size])) for size in "BH"]
    rows, columns = rng.choice((8, 16)), rng.choice((8, 16, 64))
    if kind == "made":
        assert mask_mod is not None
        B, H = sizes["B"], sizes["H"]
        return create_block_mask(mask_mod, B, H, M, N, device=device, BLOCK_SIZE=(rows, columns)), mask_mod
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    shape = (*outer, math.ceil(M / rows), math.ceil(N / columns))
    listed = (torch.rand(shape, generator=generator) < 0.6).to(device)
    full = (torch.rand(shape, generator=generator) < 0.3).to(device) & ~listed
    has_full = rng.random() < 0.6
    lists = [*_lists(listed), *(_lists(full) if has_full else ())]
    from_lists: Callable[..., BlockMask] = BlockMask.from_kv_blocks
    block_mask = from_lists(*lists, BLOCK_SIZE=(rows, columns), mask_mod=mask_mod, seq_lengths=(M, N))

    def means(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = (b * (outer[0] > 1), h * (outer[1] > 1), q // rows, kv // columns)
        held = listed[at] if mask_mod is None else listed[at] & mask_mod(b, h, q, kv)
        return held | full[at] if has_full else held

    return block_mask, means


def _lists(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the counts and the indices of blocks, those that do not count being beyond all blocks."""
    counts = table.sum(-1).int()
    indices = torch.argsort(table.int(), dim=-1, descending=True, stable=True).int()
    counted = torch.arange(table.shape[-1], device=table.device) < counts[..., None]
    return counts, torch.where(counted, indices, indices.flip(-1))
