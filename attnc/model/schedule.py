"""A schedule: how, as the spec says it, with every key checked and every set of choices expanded to values.

Whether a target can honour it is the planner's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from attnc.source import Span
from attnc.syntax import ast

Phase: TypeAlias = Literal["forward", "backward", "combine", "dq", "dkdv"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "combine", "dq", "dkdv")
#: The phases that a phase holds: the kernels of the backward, which start from the keys of `backward`.
PARTS: Mapping[Phase, tuple[Phase, ...]] = {"backward": ("dq", "dkdv")}


def whole_of(phase: Phase) -> Phase | None:
    """The phase that holds this one; None at the top."""
    return next((whole for whole, parts in PARTS.items() if phase in parts), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A value with arguments, e.g. `lazy(8)` or `unified_max(phi = 0, bounds = [-60, 60])`."""

    name: str
    args: Mapping[str, Value]

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted((k, repr(v)) for k, v in self.args.items()))))


Value: TypeAlias = int | float | bool | str | Choice | tuple["Value", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """`key = value` (one choice) or `key in {a, b}`; the first choice is the default."""

    key: str
    choices: tuple[Value, ...]
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """`when D == 256 { ... }`: entries of a phase for the variants that the condition holds for.

    `knobs` stand in place of the phase's of the same keys, `listed` in place of its lists, and `where` beside
    its conditions.
    """

    condition: ast.Expr
    knobs: Mapping[str, Knob]
    where: tuple[ast.Expr, ...]
    listed: tuple[Mapping[str, Knob], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One `schedule NAME for TARGET` block, or `schedule NAME for TARGET as LABEL`.

    `knobs[phase][key]`: keys written outside a phase block belong to "forward". `where`: pruning conditions
    per phase, kept as syntax and evaluated over a config's knobs and the variant's params. `listed`: the
    `config` lines of a phase. `whens`: what holds for some variants only; `configs.schedule_of` puts it into
    the others.
    """

    attention: str
    target: str
    knobs: Mapping[Phase, Mapping[str, Knob]]
    where: Mapping[Phase, tuple[ast.Expr, ...]]
    listed: Mapping[Phase, tuple[Mapping[str, Knob], ...]] = field(default_factory=dict)
    whens: Mapping[Phase, tuple[When, ...]] = field(default_factory=dict)
    label: str = ""
    span: Span | None = field(default=None, compare=False, repr=False)


def knobs_of(schedule: Schedule, phase: Phase) -> dict[str, Knob]:
    """The keys that are set in a phase, with all their values: those of the phase around it, and its own
    instead. What `config` lines set stands in place of what is set beside them.
    """
    whole = whole_of(phase)
    around = {} if whole is None else schedule.knobs.get(whole, {})
    knobs = {**around, **schedule.knobs.get(phase, {})}
    listed: dict[str, Knob] = {}
    for line in listed_of(schedule, phase):
        for key, knob in line.items():
            before = listed.setdefault(key, knob)
            listed[key] = replace(before, choices=tuple(dict.fromkeys((*before.choices, *knob.choices))))
    return knobs | listed


def listed_of(schedule: Schedule, phase: Phase) -> tuple[Mapping[str, Knob], ...]:
    """The `config` lines of a phase: its own, else those of the phase around it without what it sets
    itself.
    """
    if (own := schedule.listed.get(phase)) or (whole := whole_of(phase)) is None:
        return own or ()
    set_here = schedule.knobs.get(phase, {})
    return tuple(
        {key: knob for key, knob in line.items() if key not in set_here}
        for line in schedule.listed.get(whole, ())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One point of a schedule's knobs: a value for every key that applies, defaults filled in."""

    values: Mapping[str, Value]

    def __getitem__(self, key: str) -> Value:
        return self.values[key]

    def __hash__(self) -> int:
        return hash(tuple(sorted((k, repr(v)) for k, v in self.values.items())))

    def number(self, key: str) -> int:
        """The value of a numeric key."""
        value = self.values[key]
        if not isinstance(value, int):
            raise ValueError(f"{key} = {value!r} is not a number")
        return value

    def changed(self, values: Mapping[str, Value]) -> Config:
        """The config with these values instead."""
        return Config(values={**self.values, **values})
