"""A schedule: how, as the spec says it, with every key checked and every set of choices expanded to values.

Whether a target can honour it is the planner's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from attnc.source import Span
from attnc.syntax import ast

Phase: TypeAlias = Literal["forward", "backward", "combine", "dq", "dkdv", "projection", "gemv", "flat"]
#: Of an attention; keys outside of blocks belong to the first.
PHASES: tuple[Phase, ...] = ("forward", "backward", "combine", "dq", "dkdv")
#: Of a projection, likewise.
PROJECTION_PHASES: tuple[Phase, ...] = ("projection", "gemv", "flat")
#: The phases that a phase holds, which start from its keys: the kernels of the backward, and those of a
#: projection.
PARTS: Mapping[Phase, tuple[Phase, ...]] = {"backward": ("dq", "dkdv"), "projection": ("gemv", "flat")}


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


def text_of(value: Value) -> str:
    """A value as a schedule spells it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return str(value)
    args = ", ".join(f"{name} = {text_of(arg)}" for name, arg in value.args.items())
    return f"{value.name}({args})" if args else value.name


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

    name: of the attention or projection. `knobs[phase][key]`: keys written outside a phase block belong to
    "forward", or "projection". `where`: pruning conditions
    per phase, kept as syntax and evaluated over a config's knobs and the variant's params. `listed`: the
    `config` lines of a phase. `whens`: what holds for some variants only; `configs.schedule_of` puts it into
    the others.
    """

    name: str
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
    """One point of a schedule's knobs: a value for every key that its phase has, defaults filled in.

    Every key has a property, with dots as underscores, of the type that its values have; KeyError where the
    phase, or the target, has no such key.
    """

    values: Mapping[str, Value]

    # --- tiles and launches, of all phases

    @property
    def tile_q(self) -> int:
        return self.number("tile.q")

    @property
    def tile_kv(self) -> int:
        return self.number("tile.kv")

    @property
    def warps(self) -> int:
        return self.number("warps")

    @property
    def stages(self) -> int:
        return self.number("stages")

    # --- attentions: forward and backward

    @property
    def loops(self) -> tuple[Value, ...]:
        """Axes from the outermost loop to the innermost: ("q", "kv"), ("kv", "q") or ("kv",)."""
        value = self.values["loops"]
        return value if isinstance(value, tuple) else (value,)

    @property
    def warp_split(self) -> Literal["q", "kv"]:
        return "kv" if self.values["warp_split"] == "kv" else "q"

    @property
    def persistent(self) -> bool:
        return self.values["persistent"] is True

    @property
    def longest_first(self) -> bool:
        """Of the key `order`."""
        return self.values["order"] == "longest_first"

    # --- the forward

    @property
    def softmax(self) -> Value:
        return self.values["softmax"]

    @property
    def packs_heads(self) -> bool:
        """Of the key `pack`: whether the query heads of a K/V head share a tile."""
        return self.values["pack"] == "gqa"

    @property
    def split_kv(self) -> Value:
        """A number of programs, "auto", or `fixed(size = keys)`."""
        return self.values["split.kv"]

    # --- the backward

    @property
    def maxnreg(self) -> int | None:
        value = self.values["maxnreg"]
        return value if isinstance(value, int) else None

    @property
    def dp(self) -> Literal["early", "late"]:
        return "late" if self.values["dp"] == "late" else "early"

    def accumulate(self, name: str) -> Literal["two_pass", "atomic", "ordered", "sequential"]:
        """How the gradient of this input is summed."""
        match self.values[f"accumulate.d{name}"]:
            case "atomic":
                return "atomic"
            case "ordered":
                return "ordered"
            case "sequential":
                return "sequential"
            case _:
                return "two_pass"

    # --- forwards of the Hopper target

    @property
    def consumers(self) -> int:
        return self.number("consumers")

    @property
    def overlap(self) -> bool:
        return self.values["overlap"] is True

    @property
    def registers(self) -> int:
        return self.number("registers")

    # --- projections

    @property
    def tile_n(self) -> int:
        return self.number("tile.n")

    @property
    def tile_k(self) -> int:
        return self.number("tile.k")

    @property
    def split_k(self) -> int:
        return self.number("split.k")

    # --- any key

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

    def texts(self) -> dict[str, str]:
        """Every value by its text, keys in alphabetical order: what JSON can hold."""
        return {key: text_of(value) for key, value in sorted(self.values.items())}

    def changed(self, values: Mapping[str, Value]) -> Config:
        """The config with these values instead."""
        return Config(values={**self.values, **values})
