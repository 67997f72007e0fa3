"""A schedule: how, as the spec says it, with every key checked and every set of choices expanded to values.

Whether a target can honour it is the planner's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
class Schedule:
    """One `schedule NAME for TARGET` block, or `schedule NAME for TARGET as LABEL`.

    `knobs[phase][key]`: keys written outside a phase block belong to "forward". `where`: pruning conditions
    per phase, kept as syntax and evaluated over a config's knobs and the variant's params.
    """

    attention: str
    target: str
    knobs: Mapping[Phase, Mapping[str, Knob]]
    where: Mapping[Phase, tuple[ast.Expr, ...]]
    label: str = ""
    span: Span | None = field(default=None, compare=False, repr=False)


def knobs_of(schedule: Schedule, phase: Phase) -> dict[str, Knob]:
    """The keys that hold in a phase: those of the phase around it, and its own instead."""
    whole = whole_of(phase)
    around = {} if whole is None else schedule.knobs.get(whole, {})
    return {**around, **schedule.knobs.get(phase, {})}


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
