"""ProjectionVariant + Schedule -> the plan of its module: what fits, what is ragged, what to try first."""

from __future__ import annotations

from collections.abc import Iterable

from attnc.diagnostics import DiagnosticError, error
from attnc.model.configs import impls_of, projection_configs
from attnc.model.program import Impl, ProjectionVariant
from attnc.model.schedule import ProductConfig, ProjectionConfig, Schedule
from attnc.plan.device import DEVICES
from attnc.plan.ir.projection import MOST_ROWS, ProjectionModule, impl_of

#: Largest M for which an implementation is the guess where nothing was measured.
_GUESS: dict[Impl, int | None] = {"gemv": 1, "flat": 64, "conventional": None}


def plan_projection(variant: ProjectionVariant, schedule: Schedule) -> ProjectionModule:
    """The module of a variant. Raises DiagnosticError (E0409, E0509, E0601: no config of a kernel fits)."""
    offered = projection_configs(schedule, variant)
    room = max(device.shared_per_block for device in DEVICES.values())
    kept = [(config, need) for config in offered if (need := _shared(config, variant)) <= room]
    for impl in impls_of(schedule):
        needs = [_shared(config, variant) for config in offered if impl_of(config) == impl]
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
        ragged_n=_ragged([(c, c.tile_n) for c in products], variant.projection.size("N")),
        ragged_k=_ragged([(c, c.tile_k) for c in products], variant.projection.size("K")),
        is_split=any(config.split_k > 1 for config in products),
        guess=_guess(chosen),
    )


def _shared(config: ProjectionConfig, variant: ProjectionVariant) -> int:
    """Bytes of the tiles of x and w that are in flight, with as many rows of x as a tile may have."""
    if not isinstance(config, ProductConfig):
        return 0
    columns = config.tile_n + MOST_ROWS[impl_of(config)]
    stages, depth = config.stages, config.tile_k
    return stages * columns * depth * variant.projection.dtype.bytes


def _ragged(tiles: Iterable[tuple[ProductConfig, int]], size: int | None) -> frozenset[Impl]:
    """The implementations of which some tile of an axis reaches past its end."""
    return frozenset(impl_of(config) for config, tile in tiles if size is None or size % tile)


def _guess(chosen: tuple[ProjectionConfig, ...]) -> tuple[tuple[int | None, Impl], ...]:
    impls = list(dict.fromkeys(map(impl_of, chosen)))
    return (*((_GUESS[impl], impl) for impl in impls[:-1]), (None, impls[-1]))
