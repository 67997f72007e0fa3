"""Which configs of a schedule are kept, whatever the target: those that some GPU of the target can run.

Where a schedule says nothing of tiles, a target has groups of them, which take their turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import TypeAlias

from attnc.diagnostics import DiagnosticError, error
from attnc.model.schedule import Config, Phase, Schedule, Value, knobs_of
from attnc.plan.layout import Which

#: Values of the keys that a schedule does not mention.
Tiles: TypeAlias = Mapping[str, Value]
#: Why no GPU of the target can run a config; None if one can.
Misfit: TypeAlias = Callable[[Config], object | None]
#: The keys that decide what a config needs.
SIZES = ("tile.q", "tile.kv", "warps", "stages")


def first_fitting(
    found: Sequence[Config], groups: Iterable[Iterable[Tiles]], misfit: Misfit
) -> tuple[Config, ...]:
    """Each config with each of the tiles of a group: of the first group by which one comes to fit. The
    configs as they are where there is no such group.
    """
    for group in groups:
        tried = tuple(config.changed(tiles) for tiles in group for config in found)
        if any(misfit(config) is None for config in tried):
            return tried
    return tuple(found)


def phase_of(kernel: Which) -> Phase:
    """The phase of a schedule that sets the kernel's keys."""
    match kernel:
        case "forward":
            return "forward"
        case "dq" | "rows":
            return "dq"
        case _:
            return "dkdv"


def remedy(config: Config, changes: Mapping[str, Sequence[Value]], misfit: Misfit) -> tuple[str, ...]:
    """A hint that changes as few keys as possible, or none. changes: what to try, the likeliest first."""
    for count in range(1, len(changes) + 1):
        for keys in combinations(changes, count):
            for values in product(*(changes[key] for key in keys)):
                tried = dict(zip(keys, values, strict=True))
                if misfit(config.changed(tried)) is None:
                    return (f"'{', '.join(f'{key} = {value}' for key, value in tried.items())}' fits",)
    return ()


def nothing_fits(
    schedule: Schedule,
    kernel: Which,
    reason: str,
    *,
    where: str,
    notes: Sequence[str] = (),
    hints: Sequence[str] = (),
) -> DiagnosticError:
    """E0601 at the sizes that the schedule names, else at the schedule. where: what they do not fit."""
    knobs = knobs_of(schedule, phase_of(kernel))
    spans = [span for key in SIZES if key in knobs and (span := knobs[key].span) is not None]
    if not spans and schedule.span is not None:
        spans = [schedule.span]
    if not spans:
        raise ValueError(f"no span for: {reason}")
    spans.sort(key=lambda span: span.start)
    what = "" if kernel == "forward" else f" for {kernel}"
    message = f"no config of schedule '{schedule.name}'{what} fits {where}"
    span = spans[0].to(spans[-1]) if spans[0].line == spans[-1].line else spans[0]
    return DiagnosticError([error("E0601", message, span, reason, notes=notes, hints=hints)])
