"""Which implementation of a projection is fastest for which M here: measured once, written beside the spec.

Every config is a CUDA graph with a call for each of several copies of the weights, so that no weight is
in the L2 cache when it is read; x is, as after the kernel that made it. All configs at powers of two
first, then the best of each implementation again, longer and at the sizes in between.

FlashDecoding++ (arXiv 2311.01282, section 5.2) has two numbers for each [N, K] and device: M1, from which
the flat product is faster than GEMV, and M2, from which the conventional one is. That presumes that the
order never turns back; where a measurement says it does, the thresholds that lose least are taken
(`crossovers`) and what they lose is said.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import inf, log
from pathlib import Path

from attnc.build import digest, dispatch_path, front, plan_program
from attnc.model.program import IMPLS, Impl
from attnc.plan.projection import ProjectionModule, impl_of
from attnc.runtime.timing import interleave
from attnc.runtime.toolchains import toolchain_of
from attnc.runtime.trial import Layer, device_name, synchronize
from attnc.target.projection import render_projection
from attnc.tune import NothingRuns, in_processes
from attnc.tuned.tables import PROJECTION_SIZES, ChoiceTable, TableRow, known_tables, merge_tables

#: Times that differ by less are taken for equal.
_NOISE = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossovers:
    """chosen: the implementation for each measured M, ascending in the order of IMPLS; exceptions: (M, what
    was faster there, by which factor).
    """

    chosen: Mapping[int, Impl]
    exceptions: tuple[tuple[int, Impl, float], ...]

    def first(self, impl: Impl) -> int | None:
        """Returns the smallest measured M from which an implementation, or a later one, is used; None if
        never.
        """
        later = IMPLS[IMPLS.index(impl) :]
        return next((M for M, found in self.chosen.items() if found in later), None)

    def notes(self) -> tuple[str, ...]:
        m1, m2 = self.first("flat"), self.first("conventional")
        thresholds = f"M1 = {m1 or 'none'}, M2 = {m2 or 'none'}"
        if not self.exceptions:
            return (thresholds, "monotone at every M that was measured, to 1 %")
        lost = ", ".join(f"{impl} at M = {M} by {factor:.2f}x" for M, impl, factor in self.exceptions)
        return (thresholds, f"not monotone: faster would be {lost}")


def crossovers(times: Mapping[int, Mapping[Impl, float]]) -> Crossovers:
    """Returns the thresholds with the smallest product of slowdowns. times: M -> implementation ->
    microseconds.

    An implementation that was not measured at some M cannot be chosen there.
    """
    rows = sorted(times)
    impls = tuple(impl for impl in IMPLS if any(impl in times[M] for M in rows))
    best = {M: min(times[M].values()) for M in rows}

    def cost(assigned: Iterable[Impl]) -> float:
        return sum(log(times[M].get(impl, inf) / best[M]) for M, impl in zip(rows, assigned, strict=True))

    candidates = [_assign_rows(cuts, impls, len(rows)) for cuts in _cuts(len(rows), len(impls))]
    chosen: dict[int, Impl] = dict(zip(rows, min(candidates, key=cost), strict=True))
    exceptions = []
    for M in rows:
        winner = min(times[M], key=lambda impl: times[M][impl])
        if (factor := times[M][chosen[M]] / times[M][winner]) > _NOISE:
            exceptions.append((M, winner, factor))
    return Crossovers(chosen=chosen, exceptions=tuple(exceptions))


def _cuts(count: int, impls: int) -> list[tuple[int, ...]]:
    return list(combinations_with_replacement(range(count + 1), impls - 1))


def _assign_rows(cuts: Sequence[int], impls: Sequence[Impl], count: int) -> tuple[Impl, ...]:
    return tuple(impls[sum(cut <= i for cut in cuts)] for i in range(count))


#: The M at which all configs are timed, and those at which the best of them are.
SEARCHED = (1, 2, 4, 8, 16, 32, 64, 128)
TIMED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
#: GEMV is not tried for more rows.
_MOST_GEMV = 16
_FINALISTS = 3
_SAMPLE_MS = 2.0
#: The numbers of rows that kernels are compiled for.
_PADDED: Mapping[Impl, tuple[int, ...]] = {"gemv": (1, 2, 4), "flat": (8, 16, 32, 64)}
_WORKERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedLayer:
    """best[M][impl]: (position, microseconds) of its fastest config; bytes: of the weights."""

    planned: ProjectionModule
    bytes: int
    best: Mapping[int, Mapping[Impl, tuple[int, float]]]
    crossovers: Crossovers
    table: ChoiceTable


def tune_projections(path: Path, rounds: int, report: Callable[[str], None]) -> tuple[TunedLayer, ...]:
    """Measures every projection of a spec whose N and K are fixed, and merges each table into its file.

    Raises DiagnosticError for a wrong spec or file, NothingRuns where no config does. Needs a CUDA device.
    """
    known_tables(dispatch_path(path))  # before anything is measured that could not be written
    planned = _list_fixed(path)
    if planned:
        _compile_all(path)
    tuned = []
    for module in planned:
        report(f"{module.name} {module.variant.name}")
        tuned.append(_tune(module, rounds))
        merge_tables(dispatch_path(path), [tuned[-1].table])
    return tuple(tuned)


def _list_fixed(path: Path) -> list[ProjectionModule]:
    found = plan_program(front(path)).projections
    return [module for module in found if all(module.variant.projection.size(size) for size in "NK")]


def _layer(module: ProjectionModule, copies: int | None = None) -> Layer:
    source = module.variant.source
    (text,) = render_projection(module, path=Path(source.path).name, sha256=digest(source)).values()
    return Layer(module, text, copies)


def _tune(module: ProjectionModule, rounds: int) -> TunedLayer:
    layer = _layer(module)
    searched = {M: _times(layer, _positions(module, M), M, 3) for M in SEARCHED}
    best: dict[int, dict[Impl, tuple[int, float]]] = {}
    for M in TIMED:
        near = next(size for size in SEARCHED if size >= M)
        finalists = _finalists(module, searched[near])
        best[M] = _best(module, _times(layer, finalists, M, rounds))
    if not all(best.values()):
        raise NothingRuns(f"no config of {module.name} runs on this device")
    found = crossovers({M: {impl: time for impl, (_, time) in row.items()} for M, row in best.items()})
    return TunedLayer(
        planned=module,
        bytes=layer.bytes,
        best=best,
        crossovers=found,
        table=table_of(module, best, found, device_name(), toolchain_of(module.target).version()),
    )


def _times(layer: Layer, positions: Sequence[int], M: int, rounds: int) -> dict[int, float]:
    timings = interleave(layer.graphs(positions, M), rounds, sample_ms=_SAMPLE_MS)
    copies = len(layer.weights)
    return {int(name): timing.median * 1e3 / copies for name, timing in timings.items()}


def _positions(module: ProjectionModule, M: int) -> list[int]:
    return [at for at, found in enumerate(module.configs) if impl_of(found) != "gemv" or M <= _MOST_GEMV]


def _finalists(module: ProjectionModule, times: Mapping[int, float]) -> list[int]:
    ranked = sorted(times, key=lambda at: times[at])
    chosen: list[int] = []
    for impl in set(map(impl_of, module.configs)):
        chosen += [at for at in ranked if impl_of(module.configs[at]) == impl][:_FINALISTS]
    return sorted(chosen)


def _best(module: ProjectionModule, times: Mapping[int, float]) -> dict[Impl, tuple[int, float]]:
    best: dict[Impl, tuple[int, float]] = {}
    for at in sorted(times, key=lambda at: times[at]):
        best.setdefault(impl_of(module.configs[at]), (at, times[at]))
    return best


def table_of(
    module: ProjectionModule,
    best: Mapping[int, Mapping[Impl, tuple[int, float]]],
    found: Crossovers,
    device: str,
    compiler: str,
) -> ChoiceTable:
    """Returns a row for each measured M, neighbours with one choice joined; beyond them the last point of
    all.
    """
    rows: list[TableRow] = []
    for M in sorted(best):
        position, time = best[M][found.chosen[M]]
        row = TableRow(limits=(M,), choice=module.configs[position].texts(), microseconds=time)
        if rows and rows[-1].choice == row.choice:
            rows.pop()
        rows.append(row)
    last = module.configs[-1].texts()
    if rows[-1].choice != last:
        rows.append(TableRow(limits=(None,), choice=last, microseconds=0.0))
    else:
        rows[-1] = TableRow(limits=(None,), choice=last, microseconds=rows[-1].microseconds)
    return ChoiceTable(
        name=module.name,
        target=module.target,
        variant=module.variant.name,
        device=device,
        toolchain=compiler,
        sizes=PROJECTION_SIZES,
        rows=tuple(rows),
        notes=found.notes(),
    )


def _compile_all(path: Path) -> None:
    shares = max(1, min(_WORKERS, os.cpu_count() or 2))
    in_processes(_compile_share, [(path, share, shares) for share in range(shares)], shares)


def _compile_share(path: Path, share: int, shares: int) -> None:
    for module in _list_fixed(path):
        layer = _layer(module, copies=1)
        jobs = [(at, M) for at, one in enumerate(module.configs) for M in _PADDED.get(impl_of(one), ())]
        for at, M in jobs[share::shares]:
            try:
                layer.call(at, M)()
                synchronize()
            except Exception:  # the measurement meets the same failure
                continue
