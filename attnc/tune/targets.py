"""Which target of an attention is fastest for which sizes here: measured once, written beside the spec.

Each target's function is called as users call it, with the config that it takes by itself: without gradients
as CUDA graphs over copies of the inputs that leave the L2 cache, with gradients forward and backward in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnc.build import dispatch_path, front, plan_program, tuned_source
from attnc.plan import ir
from attnc.runtime.sized import Sized
from attnc.runtime.timing import interleave
from attnc.runtime.toolchains import toolchain_of
from attnc.runtime.trial import device_name
from attnc.support.by_target import Needs, runs
from attnc.target.one_import import needs_of
from attnc.tuned.choices import Choice, load_tuned
from attnc.tuned.tables import (
    ANY_TARGET,
    TARGET_SIZES,
    Row,
    Table,
    joined,
    merge_tables,
    plain_name,
)

#: Keys of a sequence. As many query rows, and so many sequences that they are 16k tokens; a decode kernel has
#: one row, and so many sequences.
KEYS = (256, 1024, 4096, 16384)
BATCHES = (1, 16)
_TOKENS = 16384
_SAMPLE_MS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPoint:
    """Microseconds of each target at one point. heads: of all sequences; gradients: whether they are made."""

    M: int
    N: int
    heads: int
    gradients: bool
    microseconds: dict[str, float]

    @property
    def fastest(self) -> str:
        return min(self.microseconds, key=lambda target: self.microseconds[target])


def target_families(path: Path, index: int = 0) -> tuple[tuple[ir.Module, ...], ...]:
    """The modules that a table picks among: those of a variant for all targets that run on a device, the
    first schedule of each. Raises DiagnosticError for a wrong spec.
    """
    found: dict[tuple[str, str], dict[str, ir.Module]] = {}
    for module in plan_program(front(path)).modules:
        if runs(Needs(*needs_of(module.target)), index):
            key = module.variant.attention.name, plain_name(module)
            found.setdefault(key, {}).setdefault(module.target, module)
    return tuple(tuple(family.values()) for family in found.values() if len(family) > 1)


def tune_targets(path: Path, rounds: int, report: Callable[[str], None]) -> tuple[Table, ...]:
    """Measures every variant that several targets have, and merges the tables into the spec's file.

    Raises DiagnosticError for a wrong spec or file. Needs a CUDA device.
    """
    source = tuned_source(path)
    choices = () if source is None else load_tuned(source)
    tables = [
        target_table(family, _points(family, choices, rounds, report), device_name())
        for family in target_families(path)
    ]
    merge_tables(dispatch_path(path), tables)
    return tuple(tables)


def target_table(family: Sequence[ir.Module], points: Sequence[TargetPoint], device: str) -> Table:
    """A row for each point, neighbours with one choice joined; the largest sizes stand for all beyond."""
    rows: list[Row] = []
    for gradients in sorted({point.gradients for point in points}):
        phase = [point for point in points if point.gradients is gradients]
        every = sorted({point.heads for point in phase}) if _decodes(family) else [0]
        for heads in every:
            box = [point for point in phase if not heads or point.heads == heads]
            box.sort(key=lambda point: point.N)
            rows += (
                Row(
                    limits=(
                        None,
                        None if point is box[-1] else point.N,
                        None if heads == every[-1] else heads,
                        None if gradients or not any(other.gradients for other in points) else 0,
                    ),
                    choice={"target": point.fastest},
                    microseconds=point.microseconds[point.fastest],
                )
                for point in box
            )
    return Table(
        name=family[0].variant.attention.name,
        target=ANY_TARGET,
        variant=plain_name(family[0]),
        device=device,
        toolchain=toolchain_of("triton").version(),
        sizes=TARGET_SIZES,
        rows=joined(rows),
    )


def _decodes(family: Sequence[ir.Module]) -> bool:
    return all(module.kernels[0].structure == "decode" for module in family)


def _points(
    family: Sequence[ir.Module], choices: Iterable[Choice], rounds: int, report: Callable[[str], None]
) -> list[TargetPoint]:
    points = []
    name = f"{family[0].variant.attention.name} {plain_name(family[0])}"
    for N in KEYS:
        for B in BATCHES if _decodes(family) else (max(1, _TOKENS // N),):
            report(f"{name} N = {N}, B = {B}")
            points.append(_forward(family, choices, 1 if _decodes(family) else N, N, B, rounds))
            if family[0].variant.attention.grads:
                points.append(_with_gradients(family, choices, N, B, rounds))
    return points


def _forward(
    family: Sequence[ir.Module], choices: Iterable[Choice], M: int, N: int, B: int, rounds: int
) -> TargetPoint:
    sized = Sized(family[0], M, N, B)
    graphs = {module.target: sized.graph(module, choices) for module in family}
    timings = interleave(graphs, rounds, sample_ms=_SAMPLE_MS)
    times = {target: timing.median * 1e3 / sized.copies for target, timing in timings.items()}
    return TargetPoint(M=M, N=N, heads=B * sized.heads, gradients=False, microseconds=times)


def _with_gradients(
    family: Sequence[ir.Module], choices: Iterable[Choice], N: int, B: int, rounds: int
) -> TargetPoint:
    sized = Sized(family[0], N, N, B)
    launches = {module.target: sized.with_gradients(module, choices) for module in family}
    timings = interleave(launches, rounds, sample_ms=_SAMPLE_MS)
    times = {target: timing.median * 1e3 for target, timing in timings.items()}
    return TargetPoint(M=N, N=N, heads=B * sized.heads, gradients=True, microseconds=times)
