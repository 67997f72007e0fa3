"""What is measured: shapes, masks and their inputs.

FLOPs are those of the two matrix products over the elements that the mask keeps, 2 D and 2 Dv each; a causal
mask counts as half of the square, as in the papers. So a library that does not skip what it masks shows as a
slow one. A backward has five such products, and counts as two and a half forwards whatever it computes twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

Mask: TypeAlias = Literal["full", "causal", "window512", "documents", "prefix", "alibi", "softcap30"]

#: What of an attention is timed: computing o, or the gradients of q, k and v from that of o.
Phase: TypeAlias = Literal["forward", "backward"]

TOKENS = 16384
HIDDEN = 2048
WINDOW = 512
DOCUMENT = 1000
PREFIX = 2048
SOFTCAP = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row of a table: self-attention of `batch` sequences of `length`, in [B, H, N, D].

    value: Dv, where it is not D.
    """

    mask: Mask
    batch: int
    heads: int
    length: int
    width: int
    value: int | None = None
    dtype: Literal["bf16", "f32"] = "bf16"

    @property
    def name(self) -> str:
        value = "" if self.value is None else f"/{self.value}"
        return f"d{self.width}{value} h{self.heads} n{self.length} {self.mask}"

    @property
    def value_width(self) -> int:
        return self.width if self.value is None else self.value

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def kept(self) -> float:
        n = self.length
        match self.mask:
            case "full":
                return n * n
            case "causal" | "alibi" | "softcap30":
                return n * n / 2
            case "window512":
                short = min(n, WINDOW)
                return short * (short + 1) / 2 + (n - short) * (WINDOW + 1)
            case "documents":
                sizes = [min(DOCUMENT, n - start) for start in range(0, n, DOCUMENT)]
                return sum(size * (size + 1) / 2 for size in sizes)
            case "prefix":
                return n * n / 2 + min(n, PREFIX) ** 2 / 2

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.heads * self.kept * (self.width + self.value_width)

    def flops_of(self, phase: Phase) -> float:
        return self.flops * (1.0 if phase == "forward" else 2.5)

    def describe(self, phase: Phase) -> str:
        return f"{self.name:26} b{self.batch:<3} {self.flops_of(phase) * 1e-9:9.1f} GFLOP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """q, k [B, H, N, D] and v [B, H, N, Dv] in the cell's type, and what the mask or score reads besides, in
    the order of the spec's inputs.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    extras: tuple[torch.Tensor, ...]


def standard() -> tuple[Cell, ...]:
    """Returns full and causal attention of 16k tokens at hidden size 2048."""
    return tuple(
        Cell(mask=mask, batch=TOKENS // length, heads=HIDDEN // width, length=length, width=width)
        for width in (64, 128, 256)
        for length in (1024, 4096, 16384)
        for mask in _PLAIN
    )


def single() -> tuple[Cell, ...]:
    """Returns the standard cells in f32, of one length and the usual head dimensions."""
    return tuple(
        replace(cell, dtype="f32") for cell in standard() if cell.length == 4096 and cell.width <= 128
    )


def masks() -> tuple[Cell, ...]:
    """Returns masks and scores that FlexAttention is for, on one long sequence."""
    return tuple(Cell(mask=mask, batch=1, heads=16, length=16384, width=128) for mask in _MASKS)


def extra() -> tuple[Cell, ...]:
    """Returns shorter sequences than the standard ones at d64, and head dimensions between theirs."""
    short = (
        Cell(mask=mask, batch=TOKENS // length, heads=HIDDEN // 64, length=length, width=64)
        for length in (512, 2048)
        for mask in _PLAIN
    )
    between = (
        Cell(mask=mask, batch=4, heads=16, length=4096, width=width, value=value)
        for width, value in ((96, None), (192, 128))
        for mask in _PLAIN
    )
    return (*short, *between)


def quick() -> tuple[Cell, ...]:
    """Lists one size of everything: some seconds instead of minutes."""
    return (*(cell for cell in standard() if cell.width == 128 and cell.length == 4096), *masks())


def draw(cell: Cell, seed: int = 0) -> Inputs:
    """Returns inputs on the current CUDA device: N(0, 1), documents of 1000 tokens, the slopes of the ALiBi
    paper.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (cell.batch, cell.heads, cell.length)
    q, k, v = (
        torch.randn(*shape, width, generator=generator, device="cuda", dtype=torch.float32).to(
            cell.torch_dtype
        )
        for width in (cell.width, cell.width, cell.value_width)
    )
    return Inputs(q=q, k=k, v=v, extras=_extras(cell))


_PLAIN: tuple[Mask, ...] = ("full", "causal")
_MASKS: tuple[Mask, ...] = ("window512", "documents", "prefix", "alibi", "softcap30")


def _extras(cell: Cell) -> tuple[torch.Tensor, ...]:
    match cell.mask:
        case "documents":
            row = torch.arange(cell.length, device="cuda", dtype=torch.int32) // DOCUMENT
            return (row.repeat(cell.batch, 1),)
        case "prefix":
            return (torch.full((cell.batch,), PREFIX, device="cuda", dtype=torch.int32),)
        case "alibi":
            powers = torch.arange(1, cell.heads + 1, device="cuda", dtype=torch.float32)
            return (torch.exp2(-8.0 * powers / cell.heads),)
        case _:
            return ()
