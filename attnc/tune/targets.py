"""Which target of an attention is fastest for which sizes here: measured once, written beside the spec.

Each target's function is called as users call it, with the config that it takes by itself: without gradients
as CUDA graphs over copies of the inputs that leave the L2 cache, with gradients forward and backward in turn.
All kernels are compiled in parallel processes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from pathlib import Path

from attnc.build import dispatch_path, front, plan_program, tuned_of
from attnc.plan import ir
from attnc.runtime.timing import interleave
from attnc.runtime.toolchains import toolchain_of
from attnc.runtime.trial import Sized, device_name
from attnc.support.by_target import Needs, runs
from attnc.target.dispatch import fastest_first, needs_of
from attnc.tune import in_processes
from attnc.tuned.choices import TunedChoice
from attnc.tuned.tables import (
    ANY_TARGET,
    TARGET_SIZES,
    ChoiceTable,
    TableRow,
    join_rows,
    known_tables,
    merge_tables,
    plain_name,
)

#: Keys of a sequence.
KEYS = (256, 1024, 4096, 16384)
#: Query rows and sequences of a decode kernel: one token and some drafts, one user and many.
ROWS, BATCHES = (1, 8), (1, 16)
#: Other kernels have as many query rows as keys, and so many sequences that they are 16k tokens; packed
#: sequences are so many, since the rows of all of them are what a call is chosen by.
_TOKENS, _PACKED = 16384, 4
_SAMPLE_MS = 4.0
#: A target that gains no more than this share of the time over one that is tried before it is lucky.
_TIE = 0.02
_WORKERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is measured: query rows and keys of each of B sequences, with gradients or without."""

    M: int
    N: int
    B: int
    gradients: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPoint:
    """Microseconds of each target at one point. M, N, BH: as a call sees them, with the rows of all sequences
    where they are packed.
    """

    M: int
    N: int
    BH: int
    gradients: bool
    microseconds: Mapping[str, float]

    @property
    def fastest(self) -> str:
        limit = min(self.microseconds.values()) * (1 + _TIE)
        return next(name for name in fastest_first(self.microseconds) if self.microseconds[name] <= limit)


def target_families(path: Path) -> tuple[tuple[ir.Module, ...], ...]:
    """Returns the modules that a table picks among: those of a variant for all targets that run on a device,
    the first schedule of each. Raises DiagnosticError for a wrong spec.
    """
    found: dict[tuple[str, str], dict[str, ir.Module]] = {}
    for module in plan_program(front(path)).modules:
        if runs(Needs(*needs_of(module.target)), 0):
            key = module.variant.attention.name, plain_name(module)
            found.setdefault(key, {}).setdefault(module.target, module)
    return tuple(tuple(family.values()) for family in found.values() if len(family) > 1)


def tune_targets(path: Path, rounds: int, report: Callable[[str], None]) -> tuple[ChoiceTable, ...]:
    """Measures every variant that several targets have, and merges each table into the spec's file.

    Raises DiagnosticError for a wrong spec or file. Needs a CUDA device.
    """
    known_tables(dispatch_path(path))  # before anything is measured that could not be written
    choices = tuned_of(path)
    families = target_families(path)
    report("compiling")
    jobs = [(path, at, module.target) for at, family in enumerate(families) for module in family]
    in_processes(_compile, jobs, _WORKERS)
    tables = []
    for family in families:
        points = []
        for size in sizes_of(family):
            name = f"{family[0].variant.attention.name} {plain_name(family[0])}"
            report(f"{name} M = {size.M}, N = {size.N}, B = {size.B}{', gradients' * size.gradients}")
            points.append(_measure(family, choices, size, rounds))
        tables.append(target_table(family, points, device_name()))
        merge_tables(dispatch_path(path), [tables[-1]])
    return tuple(tables)


def sizes_of(family: Sequence[ir.Module]) -> tuple[Size, ...]:
    """Returns the sizes at which modules of one variant are measured."""
    attention = family[0].variant.attention
    if _decodes(family):
        return tuple(Size(M=M, N=N, B=B) for N in KEYS for M in ROWS for B in BATCHES)
    packed = any(tensor.storage.is_packed for tensor in (attention.q, attention.k))
    return tuple(
        Size(M=N, N=N, B=_PACKED if packed else max(1, _TOKENS // N), gradients=gradients)
        for N in KEYS
        for gradients in ((False, True) if attention.grads else (False,))
    )


def target_table(family: Sequence[ir.Module], points: Sequence[TargetPoint], device: str) -> ChoiceTable:
    """Returns a row for each point, neighbours with one choice joined; the largest sizes stand for all
    beyond.

    A choice holds up to the geometric mean of its point and the next one.
    """
    decodes = _decodes(family)
    rows: list[TableRow] = []
    for gradients in sorted({point.gradients for point in points}):
        phase = [point for point in points if point.gradients is gradients]
        M, N, BH = (
            _limits({getattr(point, size) for point in phase} if decodes or size == "N" else ())
            for size in ("M", "N", "BH")
        )
        phase.sort(key=lambda point: (point.BH if decodes else 0, point.N, point.M))
        last = None if gradients or not any(point.gradients for point in points) else 0
        rows += (
            TableRow(
                limits=(M.get(point.M), N.get(point.N), BH.get(point.BH), last),
                choice={"target": point.fastest},
                microseconds=point.microseconds[point.fastest],
            )
            for point in phase
        )
    return ChoiceTable(
        name=family[0].variant.attention.name,
        target=ANY_TARGET,
        variant=plain_name(family[0]),
        device=device,
        toolchain=toolchain_of("triton").version(),
        sizes=TARGET_SIZES,
        rows=join_rows(rows),
    )


def _limits(measured: Iterable[int]) -> dict[int, int]:
    return {value: isqrt(value * larger) for value, larger in pairwise(sorted(measured))}


def _decodes(family: Sequence[ir.Module]) -> bool:
    return all(module.kernel.structure == "decode" for module in family)


def _measure(
    family: Sequence[ir.Module], choices: Iterable[TunedChoice], size: Size, rounds: int
) -> TargetPoint:
    sized = Sized(family[0], size.M, size.N, size.B)
    launches = {
        module.target: sized.with_gradients(module, choices)
        if size.gradients
        else sized.graph(module, choices)
        for module in family
    }
    timings = interleave(launches, rounds, sample_ms=_SAMPLE_MS)
    calls = 1 if size.gradients else sized.copies
    times = {target: timing.median * 1e3 / calls for target, timing in timings.items()}
    M, N, BH = sized.seen
    return TargetPoint(M=M, N=N, BH=BH, gradients=size.gradients, microseconds=times)


def _compile(path: Path, at: int, target: str) -> None:
    family = target_families(path)[at]
    module, choices = next(module for module in family if module.target == target), tuned_of(path)
    for size in sizes_of(family):
        with suppress(Exception):  # the measurement meets the same failure
            sized = Sized(module, size.M, size.N, size.B, most=1)
            (sized.with_gradients(module, choices) if size.gradients else sized.graph(module, choices))()
