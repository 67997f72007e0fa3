"""Which schedule of an attention is fastest for which sizes here: measured once, written beside the spec.

For attentions that have several schedules for Triton. Each runs with the config that it would take by
itself, as CUDA graphs over as many copies of the inputs as leave the L2 cache, on a grid of M, N and batch
times heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnc.build import dispatch_path, front, plan_program, tuned_of
from attnc.plan import ir
from attnc.runtime.timing import interleave
from attnc.runtime.toolchains import toolchain_of
from attnc.runtime.trial import Sized, device_name
from attnc.tuned.choices import TunedChoice
from attnc.tuned.tables import (
    ATTENTION_SIZES,
    ChoiceTable,
    TableRow,
    join_rows,
    known_tables,
    merge_tables,
    plain_name,
)

#: The sizes that are measured: query rows, keys, sequences.
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
KEYS = (1024, 8192, 65536)
BATCHES = (1, 16)
#: Keys of all sequences together, and query rows times keys, beyond which a point is left out.
_MOST_KEYS = 1 << 18
_MOST_WORK = 1 << 27
_SAMPLE_MS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Microseconds of each schedule at one point of the grid; heads: of q, kv_heads: of K and V."""

    M: int
    N: int
    B: int
    heads: int
    kv_heads: int
    microseconds: Mapping[str, float]

    @property
    def fastest(self) -> str:
        return min(self.microseconds, key=lambda label: self.microseconds[label])


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSchedules:
    """What was measured for one variant, and the table that follows."""

    points: tuple[Point, ...]
    table: ChoiceTable


def tune_schedules(path: Path, rounds: int, report: Callable[[str], None]) -> tuple[TunedSchedules, ...]:
    """Measures every attention with several Triton schedules, and merges each table into the spec's file.

    Raises DiagnosticError for a wrong spec or file. Needs a CUDA device.
    """
    known_tables(dispatch_path(path))  # before anything is measured that could not be written
    choices = tuned_of(path)
    tuned = []
    for family in families(path):
        tuned.append(_tune(family, choices, rounds, report))
        merge_tables(dispatch_path(path), [tuned[-1].table])
    return tuple(tuned)


def families(path: Path) -> tuple[tuple[ir.Module, ...], ...]:
    """Returns the modules that a table picks among: those of an attention's variant, where several schedules
    for Triton have labels. Raises DiagnosticError for a wrong spec.
    """
    found: dict[tuple[str, str], list[ir.Module]] = {}
    for module in plan_program(front(path)).modules:
        if module.target == "triton" and module.label:
            found.setdefault((module.variant.attention.name, plain_name(module)), []).append(module)
    return tuple(tuple(family) for family in found.values() if len(family) > 1)


def _tune(
    family: Sequence[ir.Module], choices: Sequence[TunedChoice], rounds: int, report: Callable[[str], None]
) -> TunedSchedules:
    points = []
    for B in BATCHES:
        for N in KEYS:
            for M in ROWS:
                if M <= N and B * N <= _MOST_KEYS and B * M * N <= _MOST_WORK:
                    report(f"{family[0].variant.attention.name} M = {M}, N = {N}, B = {B}")
                    points.append(_measure(family, choices, M, N, B, rounds))
    name, variant = family[0].variant.attention.name, plain_name(family[0])
    table = table_of(name, variant, points, device_name(), toolchain_of("triton").version())
    return TunedSchedules(points=tuple(points), table=table)


def _measure(
    family: Sequence[ir.Module], choices: Sequence[TunedChoice], M: int, N: int, B: int, rounds: int
) -> Point:
    sized = Sized(family[0], M, N, B)
    graphs = {module.label: sized.graph(module, choices) for module in family}
    timings = interleave(graphs, rounds, sample_ms=_SAMPLE_MS)
    times = {label: timing.median * 1e3 / sized.copies for label, timing in timings.items()}
    return Point(M=M, N=N, B=B, heads=sized.heads, kv_heads=sized.kv_heads, microseconds=times)


def table_of(name: str, variant: str, points: Sequence[Point], device: str, compiler: str) -> ChoiceTable:
    """Returns a row for each point, neighbours with one choice joined; the largest sizes stand for all
    beyond.

    A box of N and batch of which only few rows were measured is open towards more rows.
    """
    rows: list[TableRow] = []
    batches = sorted({point.B for point in points})
    for B in batches:
        heads = None if batches[-1] == B else B * points[0].heads
        keys = sorted({point.N for point in points if point.B == B})
        for N in keys:
            box = sorted((p for p in points if (p.B, p.N) == (B, N)), key=lambda point: point.M)
            rows += (
                TableRow(
                    limits=(
                        None if point is box[-1] else point.M,
                        None if keys[-1] == N else N,
                        heads,
                    ),
                    choice={"schedule": point.fastest},
                    microseconds=point.microseconds[point.fastest],
                )
                for point in box
            )
    return ChoiceTable(
        name=name,
        target="triton",
        variant=variant,
        device=device,
        toolchain=compiler,
        sizes=ATTENTION_SIZES,
        rows=join_rows(rows),
    )


def dump_points(tuned: TunedSchedules, path: Path) -> str:
    """Returns all that was measured as JSON, a line for each point; path: of the spec."""
    first = tuned.points[0]
    sizes = f"{first.heads} query heads, {first.kv_heads} K/V heads"
    head = {
        "device": tuned.table.device,
        "toolchain": tuned.table.toolchain,
        "spec": f"{path.as_posix()}, {tuned.table.variant}, {sizes}",
    }
    points = ",\n".join(f"  {json.dumps(_entry(point))}" for point in tuned.points)
    return f'{{\n {json.dumps(head)[1:-1]},\n "points": [\n{points}\n ]\n}}\n'


def _entry(point: Point) -> dict[str, object]:
    times = {label: round(time, 2) for label, time in point.microseconds.items()}
    return {"M": point.M, "N": point.N, "B": point.B, "heads": point.heads, "microseconds": times}
