"""ProjectionVariant + Schedule -> the plan of its module: two kernels, torch's own product, what fits, what
is ragged, what to try first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

from attnc.diagnostics import DiagnosticError, error
from attnc.model.configs import impls_of, projection_configs
from attnc.model.program import IMPLS, Impl, ProjectionVariant
from attnc.model.schedule import ProductConfig, ProjectionConfig, Schedule
from attnc.plan.device import DEVICES

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
        chain = K if self.steps == 0 else -(-K // self.steps)
        return self.per_addition * (chain + self.depth) * 2.0**-24 + self.partial


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionModule:
    """One file of generated/: a projection's variant for a target.

    configs: what can be chosen from, by implementation and best for ascending M, the default of each first;
    shared: bytes of shared memory that a block of each needs; ragged_n, ragged_k: by implementation, whether
    some tile reaches past the end of the axis; is_split: whether some config splits K among programs; guess:
    (largest M, implementation) for a device without measurements, the last open.
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

    def state_bound(self, position: int) -> DotBound:
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
    """Returns the implementation that a config of a projection is of."""
    return next(impl for impl in IMPLS if impl == config.impl)


#: Largest M for which an implementation is the guess where nothing was measured.
_GUESS: dict[Impl, int | None] = {"gemv": 1, "flat": 64, "conventional": None}


def plan_projection(variant: ProjectionVariant, schedule: Schedule) -> ProjectionModule:
    """Returns the module of a variant. Raises DiagnosticError (E0409, E0509, E0601: no config of a kernel
    fits).
    """
    offered = projection_configs(schedule, variant)
    room = max(device.shared_per_block for device in DEVICES.values())
    kept = [(config, need) for config in offered if (need := _count_shared_bytes(config, variant)) <= room]
    for impl in impls_of(schedule):
        needs = [_count_shared_bytes(config, variant) for config in offered if impl_of(config) == impl]
        if min(needs) > room and schedule.span is not None:
            message = f"no config of '{impl}' fits any GPU"
            label = f"needs {min(needs)} B of shared memory; the most there is is {room} B"
            raise DiagnosticError([error("E0601", message, schedule.span, label)])
    chosen = tuple(config for config, _ in kept)
    products = [config for config in chosen if isinstance(config, ProductConfig)]
    return ProjectionModule(
        variant=variant,
        target=schedule.target,
        configs=chosen,
        shared=tuple(need for _, need in kept),
        ragged_n=_find_ragged([(c, c.tile_n) for c in products], variant.projection.size("N")),
        ragged_k=_find_ragged([(c, c.tile_k) for c in products], variant.projection.size("K")),
        is_split=any(config.split_k > 1 for config in products),
        guess=_guess(chosen),
    )


def _count_shared_bytes(config: ProjectionConfig, variant: ProjectionVariant) -> int:
    if not isinstance(config, ProductConfig):
        return 0
    columns = config.tile_n + MOST_ROWS[impl_of(config)]
    stages, depth = config.stages, config.tile_k
    return stages * columns * depth * variant.projection.dtype.bytes


def _find_ragged(tiles: Iterable[tuple[ProductConfig, int]], size: int | None) -> frozenset[Impl]:
    return frozenset(impl_of(config) for config, tile in tiles if size is None or size % tile)


def _guess(chosen: tuple[ProjectionConfig, ...]) -> tuple[tuple[int | None, Impl], ...]:
    impls = list(dict.fromkeys(map(impl_of, chosen)))
    return (*((_GUESS[impl], impl) for impl in impls[:-1]), (None, impls[-1]))
