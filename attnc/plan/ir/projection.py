"""The plan of a projection's module: two kernels, torch's own product, and what is known at compile time."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from attnc.model.program import IMPLS, Impl, ProjectionVariant
from attnc.model.schedule import ProductConfig, ProjectionConfig

#: Most rows of x that one program of each kernel takes; fewer are padded to a power of two, for `flat` of at
#: least 8: the smaller side of a tensor core's product. A library pads to 64 or more (FlashDecoding++, 4).
MOST_ROWS: dict[Impl, int] = {"gemv": 4, "flat": 64}
FEWEST_ROWS: dict[Impl, int] = {"gemv": 1, "flat": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class DotBound:
    """The componentwise bound of one implementation on |y - (x w^T + bias)|:

        (roundings(K) u + partial) (sum_k |x_mk w_nk| + |bias_n|) + u_y |y|,   u = 2^-24

    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1, with the length of the longest chain
    of additions for n). steps: columns of x between two roundings of one sum, 0 where every addition may
    round; depth: roundings besides; per_addition: 2 where sums are truncated, as tensor cores do;
    partial: unit roundoff of partial results that are kept in the type of y.
    """

    steps: int
    depth: int
    per_addition: float
    partial: float

    def relative(self, K: int) -> float:
        """What multiplies the sum of absolute products."""
        chain = K if self.steps == 0 else -(-K // self.steps)
        return self.per_addition * (chain + self.depth) * 2.0**-24 + self.partial


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionModule:
    """One file of generated/: a projection's variant for a target.

    configs: what can be chosen from, by implementation and best for ascending M, the default of each first;
    shared: bytes of shared memory that a block of each needs; ragged_n, ragged_k: by implementation, whether
    some tile reaches past the end of the axis; is_split: whether some config splits K among programs; guess:
    (largest M, implementation) for a device that nobody has measured, the last open.
    """

    variant: ProjectionVariant
    target: str
    configs: tuple[ProjectionConfig, ...]
    shared: tuple[int, ...]
    ragged_n: frozenset[Impl]
    ragged_k: frozenset[Impl]
    is_split: bool
    guess: tuple[tuple[int | None, Impl], ...]

    @property
    def name(self) -> str:
        return self.variant.projection.name

    def bound(self, position: int) -> DotBound:
        """What the config at this position promises."""
        config = self.configs[position]
        dtype = self.variant.projection.dtype
        match config:
            case ProductConfig(impl="gemv", split_k=split, tile_k=depth):
                return DotBound(
                    steps=depth * split,
                    depth=int(log2(depth)) + split + 3,
                    per_addition=1.0,
                    partial=0.0,
                )
            case ProductConfig(split_k=split):
                return DotBound(steps=0, depth=split + 3, per_addition=2.0, partial=0.0)
            case _:
                # torch lets cuBLAS keep the partial sums of 16-bit products in 16 bits.
                partial = dtype.unit_roundoff if dtype.bytes == 2 else 0.0
                return DotBound(steps=0, depth=3, per_addition=2.0, partial=partial)


def impl_of(config: ProjectionConfig) -> Impl:
    """The implementation that a config of a projection is of."""
    return next(impl for impl in IMPLS if impl == config.impl)
