"""The schedule of a projection: which implementations it has, and the knobs of each.

    schedule NAME for triton { impl in {gemv, flat, conventional}, gemv { tile.n in {4, 8} } ... }

Which implementation is fastest depends on M and the device (FlashDecoding++, section 5: "heuristic
dataflow"); `attnc tune` measures it, and the generated module looks it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Literal, TypeAlias

from attnc.diagnostics import DiagnosticError, Label, did_you_mean, error
from attnc.model.conditions import check_condition, holds
from attnc.model.configs import MAX_CONFIGS
from attnc.model.knobs import Kind
from attnc.model.report import Report
from attnc.model.schedule import Knob, Value
from attnc.source import Span
from attnc.syntax import ast

Impl: TypeAlias = Literal["gemv", "flat", "conventional"]
#: In the order in which they are best as M grows.
IMPLS: tuple[Impl, ...] = ("gemv", "flat", "conventional")
#: Those with kernels of their own, and hence with knobs.
KERNELS: tuple[Impl, ...] = ("gemv", "flat")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowKey:
    """A key of an implementation's block: a test for its values, what they are, the default of each."""

    allows: Callable[[int], bool]
    allowed: str
    default: Mapping[Impl, int]


def _power(low: int, high: int) -> Callable[[int], bool]:
    return lambda value: low <= value <= high and value & (value - 1) == 0


KEYS: Mapping[str, DataflowKey] = {
    "tile.n": DataflowKey(
        allows=_power(1, 256), allowed="a power of two, at most 256", default={"gemv": 4, "flat": 64}
    ),
    "tile.k": DataflowKey(
        allows=_power(16, 4096), allowed="a power of two from 16 to 4096", default={"gemv": 512, "flat": 128}
    ),
    "warps": DataflowKey(allows=_power(1, 16), allowed="1, 2, 4, 8 or 16", default={"gemv": 4, "flat": 4}),
    "stages": DataflowKey(
        allows=lambda value: 1 <= value <= 8, allowed="1 to 8", default={"gemv": 2, "flat": 4}
    ),
    "split.k": DataflowKey(
        allows=lambda value: 1 <= value <= 64, allowed="1 to 64", default={"gemv": 1, "flat": 1}
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """One schedule of a projection. knobs[impl][key], where[impl]: as `Schedule` has them by phase."""

    projection: str
    target: str
    impls: tuple[Impl, ...]
    knobs: Mapping[Impl, Mapping[str, Knob]]
    where: Mapping[Impl, tuple[ast.Expr, ...]]
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An implementation with a value for each of its keys; `conventional` has none."""

    impl: Impl
    values: Mapping[str, int]

    def __getitem__(self, key: str) -> int:
        return self.values[key]

    def knobs(self) -> dict[str, str]:
        """As a table of choices spells it."""
        return {"impl": self.impl, **{key: str(value) for key, value in sorted(self.values.items())}}


def resolve_dataflow(tree: ast.Schedule, report: Report) -> Dataflow | None:
    """The schedule of a projection, or None after reporting what is wrong."""
    before = report.errors
    if tree.target.id != "triton":
        report.error(
            "E0602",
            f"projections are not compiled for '{tree.target.id}'",
            tree.target.span,
            "only for triton",
            hints=(f"write 'schedule {tree.attention.id} for triton'",),
        )
    if tree.label is not None:
        label = "implementations are alternatives already"
        report.error("E0408", "a projection has one schedule, without a label", tree.label.span, label)
    block = _Block(report)
    for entry in tree.entries:
        match entry:
            case ast.Setting():
                block.outside(entry)
            case ast.Where(condition=condition):
                label = "gemv { ... } and flat { ... } have conditions of their own"
                report.error("E0407", "a condition of no implementation", condition.span, label)
            case ast.Phase():
                block.implementation(entry)
            case ast.When() | ast.Listed():
                block.refuse_entry(entry)
    if report.errors > before:
        return None
    return Dataflow(
        projection=tree.attention.id,
        target=tree.target.id,
        impls=block.impls or IMPLS,
        knobs=block.knobs,
        where={impl: tuple(found) for impl, found in block.where.items()},
        span=tree.span,
    )


@dataclass(slots=True)
class _Block:
    report: Report
    impls: tuple[Impl, ...] = ()
    knobs: dict[Impl, dict[str, Knob]] = field(default_factory=lambda: {impl: {} for impl in KERNELS})
    where: dict[Impl, list[ast.Expr]] = field(default_factory=lambda: {impl: [] for impl in KERNELS})

    def outside(self, tree: ast.Setting) -> None:
        """The one setting that belongs to no implementation: which ones there are."""
        if tree.key.id in KEYS:
            self.report.error(
                "E0404",
                f"'{tree.key.id}' belongs to an implementation",
                tree.key.span,
                "gemv and flat have keys of their own",
                hints=(f"write 'flat {{ {tree.key.id} = ... }}'",),
            )
            return
        if tree.key.id != "impl":
            self._unknown(tree.key, ("impl", *KEYS))
            return
        if self.impls:
            self.report.error("E0405", "'impl' is set twice", tree.span, "second time")
            return
        names = [value.id if isinstance(value, ast.Name) else "" for value in tree.values]
        for name, value in zip(names, tree.values, strict=True):
            if name not in IMPLS:
                self._refuse("impl", value, ", ".join(IMPLS), did_you_mean(name, IMPLS))
            elif names.count(name) > 1:
                self.report.error("E0405", f"'{name}' is listed twice", value.span, "second time")
        self.impls = tuple(impl for impl in IMPLS if impl in names)

    def implementation(self, tree: ast.Phase) -> None:
        name = tree.name.id
        if name not in KERNELS:
            label = (
                "it is one of torch's, without knobs" if name == "conventional" else "there is gemv and flat"
            )
            hints = did_you_mean(name, KERNELS)
            message = f"'{name}' is not an implementation with keys"
            self.report.error("E0406", message, tree.name.span, label, hints=hints)
            return
        impl: Impl = name
        for entry in tree.entries:
            match entry:
                case ast.Setting():
                    self._setting(entry, impl)
                case ast.Where(condition=condition):
                    names: dict[str, Kind] = dict.fromkeys(KEYS, "number")
                    if check_condition(condition, names, self.report):
                        self.where[impl].append(condition)
                case ast.Phase(name=inner):
                    label = "implementations do not nest"
                    self.report.error("E0406", f"'{inner.id}' inside '{name}'", inner.span, label)
                case ast.When() | ast.Listed():
                    self.refuse_entry(entry)

    def refuse_entry(self, entry: ast.When | ast.Listed) -> None:
        word = "when" if isinstance(entry, ast.When) else "config"
        label = "gemv and flat hold settings and 'where'"
        self.report.error("E0406", f"'{word}' in the schedule of a projection", entry.span, label)

    def _setting(self, tree: ast.Setting, impl: Impl) -> None:
        key = KEYS.get(tree.key.id)
        if key is None:
            self._unknown(tree.key, tuple(KEYS))
            return
        choices: list[Value] = []
        for value in tree.values:
            number = value.value if isinstance(value, ast.Number) else None
            if not isinstance(number, int) or not key.allows(number):
                self._refuse(tree.key.id, value, key.allowed)
            elif number in choices:
                self.report.error("E0405", f"'{number}' is listed twice", value.span, "second time")
            else:
                choices.append(number)
        knob = Knob(key=tree.key.id, choices=tuple(choices), span=tree.span)
        first = self.knobs[impl].setdefault(tree.key.id, knob)
        if first is not knob and first.span is not None:
            related = (Label(first.span, "first time"),)
            message = f"'{tree.key.id}' is set twice"
            self.report.error("E0405", message, tree.span, "second time", related=related)

    def _unknown(self, name: ast.Name, known: tuple[str, ...]) -> None:
        self.report.error(
            "E0402",
            f"unknown key '{name.id}'",
            name.span,
            "not a key of a projection's schedule",
            notes=(f"the keys are {', '.join(known)}",),
            hints=did_you_mean(name.id, known),
        )

    def _refuse(self, key: str, value: ast.Expr, allowed: str, hints: Sequence[str] = ()) -> None:
        message = f"'{key}' cannot be '{value.span.text}'"
        self.report.error("E0403", message, value.span, f"allowed: {allowed}", hints=hints)


def points(dataflow: Dataflow) -> tuple[Point, ...]:
    """The points of each implementation, in the order of IMPLS, the default of each first.

    Raises DiagnosticError when an implementation has none (E0409) or more than MAX_CONFIGS (E0509).
    """
    made: list[Point] = []
    for impl in dataflow.impls:
        made += [Point(impl=impl, values={})] if impl not in KERNELS else _points(dataflow, impl)
    return tuple(made)


def _points(dataflow: Dataflow, impl: Impl) -> list[Point]:
    knobs, conditions = dataflow.knobs[impl], dataflow.where[impl]
    choices = [knobs[name].choices if name in knobs else (key.default[impl],) for name, key in KEYS.items()]
    if (count := prod(map(len, choices))) > MAX_CONFIGS:
        message = f"'{impl}' has {count} configs before 'where'; the limit is {MAX_CONFIGS}"
        raise DiagnosticError([error("E0509", message, _place(dataflow), "too many to choose from")])
    all_points: list[dict[str, Value]] = [
        dict(zip(KEYS, values, strict=True)) for values in product(*choices)
    ]
    kept = [point for point in all_points if all(holds(condition, point) for condition in conditions)]
    if not kept:
        message = f"no config of '{impl}' is left"
        raise DiagnosticError(
            [error("E0409", message, conditions[-1].span, "excludes all that the others leave")]
        )
    return [
        Point(impl=impl, values={key: int(value) for key, value in point.items() if isinstance(value, int)})
        for point in kept
    ]


def _place(dataflow: Dataflow) -> Span:
    assert dataflow.span is not None, "a schedule comes from a file"
    return dataflow.span
