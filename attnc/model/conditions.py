"""`where` conditions of a schedule: checked once, then evaluated over a config's knobs and a variant's
params.

They compare numbers (`tile.q <= tile.kv`) and words (`order == longest_first`); lists have no operators.
Evaluation is total: what has no value, such as 1 // 0 or an order between words, compares as false.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TypeAlias

from attnc.diagnostics import did_you_mean
from attnc.effort import spend
from attnc.model.knobs import Kind
from attnc.model.report import Report
from attnc.model.schedule import Choice, Value
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


def check_condition(tree: ast.Expr, names: Mapping[str, Kind], report: Report) -> bool:
    """Whether the tree is a condition over these names; reports what is wrong with it otherwise."""
    before = report.errors
    kind = _kind(tree, names, report)
    if kind not in (None, "bool"):
        report.error("E0407", "not a condition", tree.span, f"this is a {kind}, neither true nor false")
    return report.errors == before


def _kind(tree: ast.Expr, names: Mapping[str, Kind], report: Report) -> Kind | None:
    """What kind of value the tree has; None after a report. Every part is looked at, even after a mistake."""

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
    """Whether a checked condition is true; a name without a value is a word and stands for itself."""
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
