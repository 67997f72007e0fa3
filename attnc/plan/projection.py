"""ProjectionVariant + Dataflow -> the plan of its module: what fits, what is ragged, what to try first."""

from __future__ import annotations

from attnc.diagnostics import DiagnosticError, error
from attnc.model.dataflow import Dataflow, Impl, Point, points
from attnc.model.projection import ProjectionVariant
from attnc.plan.device import DEVICES
from attnc.plan.ir_projection import MOST_ROWS, ProjectionModule

#: Largest M for which an implementation is the guess where nothing was measured.
_GUESS: dict[Impl, int | None] = {"gemv": 1, "flat": 64, "conventional": None}


def plan_projection(variant: ProjectionVariant, dataflow: Dataflow) -> ProjectionModule:
    """The module of a variant. Raises DiagnosticError (E0409, E0509, E0601: no config of a kernel fits)."""
    offered = points(dataflow)
    room = max(device.shared_per_block for device in DEVICES.values())
    kept = [(point, need) for point in offered if (need := _shared(point, variant)) <= room]
    for impl in dataflow.impls:
        needs = [_shared(point, variant) for point in offered if point.impl == impl]
        if min(needs) > room and dataflow.span is not None:
            message = f"no config of '{impl}' fits any GPU"
            label = f"needs {min(needs)} B of shared memory; the most there is is {room} B"
            raise DiagnosticError([error("E0601", message, dataflow.span, label)])
    chosen = tuple(point for point, _ in kept)
    return ProjectionModule(
        variant=variant,
        target=dataflow.target,
        points=chosen,
        shared=tuple(need for _, need in kept),
        ragged_n=_ragged(chosen, variant.projection.size("N"), "tile.n"),
        ragged_k=_ragged(chosen, variant.projection.size("K"), "tile.k"),
        is_split=any(point.values.get("split.k", 1) > 1 for point in chosen),
        guess=_guess(chosen),
    )


def _shared(point: Point, variant: ProjectionVariant) -> int:
    """Bytes of the tiles of x and w that are in flight, with as many rows of x as a tile may have."""
    if point.impl == "conventional":
        return 0
    columns = point["tile.n"] + MOST_ROWS[point.impl]
    return point["stages"] * columns * point["tile.k"] * variant.projection.dtype.bytes


def _ragged(chosen: tuple[Point, ...], size: int | None, key: str) -> frozenset[Impl]:
    return frozenset(
        point.impl for point in chosen if key in point.values and (size is None or size % point[key])
    )


def _guess(chosen: tuple[Point, ...]) -> tuple[tuple[int | None, Impl], ...]:
    impls = list(dict.fromkeys(point.impl for point in chosen))
    return (*((_GUESS[impl], impl) for impl in impls[:-1]), (None, impls[-1]))
