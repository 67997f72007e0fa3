"""Schedule x Variant -> Configs: the points of its knobs and `config` lines that its `where` conditions
admit. A projection has a config for each point of each of its implementations.

Conditions are checked once, then evaluated over a config's knobs and a variant's params. They compare
numbers (`tile.q <= tile.kv`) and words (`order == longest_first`); lists have no operators. Evaluation is
total: what has no value, such as 1 // 0 or an order between words, compares as false.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from typing import Literal, TypeAlias, overload

from attnc.diagnostics import LIFT, DiagnosticError, Label, Reporter, did_you_mean, error
from attnc.effort import at_most, spend
from attnc.expr.nodes import Const
from attnc.model.attention import Variant
from attnc.model.knobs import Kind, keys_of
from attnc.model.program import IMPLS, Impl, ProjectionVariant
from attnc.model.schedule import (
    BackwardConfig,
    Choice,
    Config,
    ForwardConfig,
    Knob,
    Phase,
    ProjectionConfig,
    Schedule,
    Value,
    config_type,
    listed_of,
    whole_of,
)
from attnc.syntax import ast

#: What a name in a condition may be worth; None: no value.
Operand: TypeAlias = "int | float | bool | str | tuple[Operand, ...] | None"

_ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
_ORDER: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def check_condition(tree: ast.Expr, names: Mapping[str, Kind], report: Reporter) -> bool:
    """Returns whether the tree is a condition over these names; reports what is wrong with it otherwise."""
    before = report.errors
    kind = _kind(tree, names, report)
    if kind not in (None, "bool"):
        report.error("E0407", "not a condition", tree.span, f"this is a {kind}, neither true nor false")
    return report.errors == before


def _kind(tree: ast.Expr, names: Mapping[str, Kind], report: Reporter) -> Kind | None:
    """Returns the kind of value that the tree has; None after a report. Every part is looked at, even after a
    mistake.
    """

    def need(part: ast.Expr, *wanted: Kind) -> bool:
        kind = _kind(part, names, report)
        if kind is not None and kind not in wanted:
            report.error("E0407", f"a {kind} where a {wanted[0]} is needed", part.span, f"this is a {kind}")
        return kind in wanted

    def needs(parts: tuple[ast.Expr, ...], *wanted: Kind) -> bool:
        return [need(part, *wanted) for part in parts].count(False) == 0

    match tree:
        case ast.Number():
            return "number"
        case ast.Bool():
            return "bool"
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name):
            label = "not a key, a param or a value of a key"
            report.error("E0203", f"unknown name '{name}'", tree.span, label, hints=did_you_mean(name, names))
            return None
        case ast.UnaryOp(operand=operand):
            return "number" if need(operand, "number") else None
        case ast.BinaryOp(left=left, right=right):
            return "number" if needs((left, right), "number") else None
        case ast.Not(operand=operand):
            return "bool" if need(operand, "bool") else None
        case ast.BoolOp(operands=operands):
            return "bool" if needs(operands, "bool") else None
        case ast.Compare(operands=operands, ops=ops) if all(op in ("==", "!=") for op in ops):
            kinds = {_kind(part, names, report) for part in operands}
            if None not in kinds and len(kinds - {"any"}) > 1:
                report.error(
                    "E0407",
                    "never equal",
                    tree.span,
                    f"compares a {' with a '.join(sorted(map(str, kinds)))}",
                )
            return None if None in kinds else "bool"
        case ast.Compare(operands=operands):
            return "bool" if needs(operands, "number", "any") else None
        case ast.Call() | ast.Subscript() | ast.ListValue():
            report.error("E0407", "not a condition", tree.span, "conditions compare keys, params and numbers")
            return None


def holds(tree: ast.Expr, values: Mapping[str, Value]) -> bool:
    """Returns whether a checked condition is true; a name without a value is a word and stands for itself."""
    return _evaluate(tree, values) is True


def _evaluate(tree: ast.Expr, values: Mapping[str, Value]) -> Operand:
    spend(0.5)
    match tree:
        case ast.Number(value=value) | ast.Bool(value=value):
            return value
        case ast.Name(id=name):
            return _plain(values.get(name, name))
        case ast.UnaryOp(operand=operand):
            return _arithmetic("-", 0, _evaluate(operand, values))
        case ast.BinaryOp(op=op, left=left, right=right):
            return _arithmetic(op, _evaluate(left, values), _evaluate(right, values))
        case ast.Not(operand=operand):
            return not holds(operand, values)
        case ast.BoolOp(op=op, operands=operands):
            return (all if op == "and" else any)(holds(part, values) for part in operands)
        case ast.Compare(operands=operands, ops=ops):
            parts = [_evaluate(part, values) for part in operands]
            return all(_compare(op, parts[i], parts[i + 1]) for i, op in enumerate(ops))
        case _:
            return None


def _plain(value: Value) -> Operand:
    if isinstance(value, Choice):
        return value.name
    return tuple(_plain(item) for item in value) if isinstance(value, tuple) else value


def _arithmetic(op: str, left: Operand, right: Operand) -> Operand:
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return None
    try:
        return _ARITHMETIC[op](left, right)
    except ArithmeticError:
        return None


def _compare(op: str, left: Operand, right: Operand) -> bool:
    if left is None or right is None:
        return False
    if op in ("==", "!="):
        return (left == right) == (op == "==")
    if isinstance(left, int | float) and isinstance(right, int | float):
        return _ORDER[op](left, right)
    return False


MAX_CONFIGS = 4096
AnyVariant: TypeAlias = Variant | ProjectionVariant


def schedule_of(schedule: Schedule, variant: AnyVariant) -> Schedule:
    """Returns the schedule of one variant: what `when` blocks say of it put in, the blocks themselves gone.

    Raises DiagnosticError where two blocks that hold for the variant set the same key.
    """
    if not schedule.whens:
        return schedule
    values = dict(variant.params) | _sizes(variant)
    knobs, where, listed = dict(schedule.knobs), dict(schedule.where), dict(schedule.listed)
    for phase, whens in schedule.whens.items():
        chosen = [when for when in whens if holds(when.condition, values)]
        own: dict[str, Knob] = {}
        for key, knob in ((key, knob) for when in chosen for key, knob in when.knobs.items()):
            if own.setdefault(key, knob) is not knob:
                raise _set_twice(own[key], knob, variant)
        knobs[phase] = {**knobs.get(phase, {}), **own}
        where[phase] = (*where.get(phase, ()), *(part for when in chosen for part in when.where))
        lines = tuple(line for when in chosen for line in when.listed)
        listed[phase] = lines or tuple(
            {key: knob for key, knob in line.items() if key not in own} for line in listed.get(phase, ())
        )
    return replace(schedule, knobs=knobs, where=where, listed=listed, whens={})


def _set_twice(first: Knob, second: Knob, variant: AnyVariant) -> DiagnosticError:
    assert first.span is not None, "a schedule comes from a file"
    assert second.span is not None, "a schedule comes from a file"
    message = f"'{first.key}' is set twice for variant '{variant.name}'"
    related = (Label(first.span, "first time"),)
    hints = ("both 'when' blocks hold for it; let one of them exclude it",)
    return DiagnosticError(
        [error("E0405", message, second.span, "second time", related=related, hints=hints)]
    )


@overload
def configs(
    schedule: Schedule, phase: Literal["forward"], variant: AnyVariant
) -> tuple[ForwardConfig, ...]: ...
@overload
def configs(
    schedule: Schedule, phase: Literal["backward", "dq", "dkdv"], variant: AnyVariant
) -> tuple[BackwardConfig, ...]: ...
@overload
def configs(
    schedule: Schedule, phase: Literal["gemv", "flat"], variant: AnyVariant
) -> tuple[ProjectionConfig, ...]: ...
@overload
def configs(schedule: Schedule, phase: Phase, variant: AnyVariant) -> tuple[Config, ...]: ...
def configs(schedule: Schedule, phase: Phase, variant: AnyVariant) -> tuple[Config, ...]:
    """Returns every config of a phase, the default first: a value for each key of the phase, absent keys at
    their defaults.

    The default of `tile.d` is the whole head dimension. A kernel of the backward has the keys of `backward`,
    its own instead of those of the same name, and obeys the conditions of both. Raises DiagnosticError when
    no config satisfies the conditions, and when there are more than MAX_CONFIGS before pruning.
    """
    schedule = schedule_of(schedule, variant)
    phases = (phase,) if (whole := whole_of(phase)) is None else (whole, phase)
    names = {
        key: of
        for part in phases
        for key, of in keys_of(part, _grads(variant)).items()
        if of.target in ("", schedule.target)
    }
    dims = _sizes(variant)
    defaults: dict[str, tuple[Value, ...]] = {
        name: (dims["D"] if name == "tile.d" else key.default,) for name, key in names.items()
    }
    set_beside = {key: knob.choices for part in phases for key, knob in schedule.knobs.get(part, {}).items()}
    said = [
        set_beside | {key: knob.choices for key, knob in line.items()}
        for line in listed_of(schedule, phase) or ({},)
    ]
    # Keys that another target has alone are the planner's to refuse.
    lines = [{name: line.get(name, default) for name, default in defaults.items()} for line in said]
    place = schedule.span or variant.source.span(0, 0)
    if (count := sum(prod(map(len, line.values())) for line in lines)) > at_most(MAX_CONFIGS):
        message = f"the {phase} phase has {count} configs before 'where'; the limit is {MAX_CONFIGS}"
        raise DiagnosticError([error("E0509", message, place, "too many to choose from", hints=(LIFT,))])
    spend(count)
    every = dict.fromkeys(values for line in lines for values in product(*line.values()))
    points = [dict(zip(defaults, values, strict=True)) for values in every]
    conditions = [condition for part in phases for condition in schedule.where.get(part, ())]
    params: dict[str, Value] = dict(variant.params)
    kind = config_type(phase, names)
    kept = tuple(
        kind.of(point)
        for point in points
        if all(holds(condition, params | dims | point) for condition in conditions)
    )
    if not kept:
        condition = next(
            (c for c in conditions if not any(holds(c, params | dims | p) for p in points)), conditions[-1]
        )
        raise DiagnosticError(
            [
                error(
                    "E0409",
                    f"no config of the {phase} phase is left for variant '{variant.name}'",
                    condition.span,
                    "excludes all of them, or all that the others leave",
                    notes=(f"there are {count} before 'where'",),
                )
            ]
        )
    return kept


def projection_configs(schedule: Schedule, variant: ProjectionVariant) -> tuple[ProjectionConfig, ...]:
    """Returns the configs of each implementation, in the order of IMPLS, the default of each first. Its name
    is the value of `impl`; `conventional` has no other keys.
    """
    chosen = schedule_of(schedule, variant)
    made: list[ProjectionConfig] = []
    for impl in impls_of(chosen):
        only = {"impl": Knob(key="impl", choices=(impl,))}
        alone = replace(chosen, knobs={**chosen.knobs, "projection": only})
        made += [ProjectionConfig(impl=impl)] if impl == "conventional" else configs(alone, impl, variant)
    return tuple(made)


def impls_of(schedule: Schedule) -> tuple[Impl, ...]:
    """Returns the implementations that a schedule has, all if it does not say."""
    knob = schedule.knobs.get("projection", {}).get("impl")
    return IMPLS if knob is None else tuple(impl for impl in IMPLS if impl in knob.choices)


def _grads(variant: AnyVariant) -> tuple[str, ...]:
    return variant.attention.grads if isinstance(variant, Variant) else ()


def _sizes(variant: AnyVariant) -> dict[str, Value]:
    if not isinstance(variant, Variant):
        known = {name: variant.projection.size(name) for name in ("N", "K")}
        return {name: size for name, size in known.items() if size is not None}
    dims: dict[str, Value] = {}
    for name, tensor in (("D", variant.attention.q), ("Dv", variant.attention.v)):
        size = tensor.shape[-1]
        assert isinstance(size, Const), "head dimensions of a variant are numbers"
        dims[name] = size.value
    return dims
