"""Smart constructors of conditions, and of `where`: build a node, folding constants on the way.

Comparisons of constants, and of integers with infinity, are decided, and nested `and` and `or` are one node
without repetitions, its operands in order of first appearance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from attnc.effort import spend
from attnc.expr.arithmetic import keeps_type, number
from attnc.expr.nodes import FALSE, TRUE, And, Call, Compare, CompareOp, Const, Expr, Not, Or

#: not (a < b)  <=>  a >= b; and a < b  <=>  b > a
NEGATED: Mapping[CompareOp, CompareOp] = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
MIRRORED: Mapping[CompareOp, CompareOp] = {"==": "==", "!=": "!=", "<": ">", ">": "<", "<=": ">=", ">=": "<="}

_COMPARISONS: Mapping[CompareOp, Callable[[float, float], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def compare(op: CompareOp, left: Expr, right: Expr) -> Expr:
    """Builds left <op> right; a float need not be equal to itself."""
    a, b = number(left), number(right)
    if a is not None and b is not None:
        return Const(_COMPARISONS[op](a, b))
    if left == right and left.type != "float":  # NaN is not equal to itself
        return Const(op in ("==", "<=", ">="))
    if a is not None and right.type == "int" and math.isinf(a):
        return Const(_COMPARISONS[op](a, 0))
    if b is not None and left.type == "int" and math.isinf(b):
        return Const(_COMPARISONS[op](0, b))
    if left.type == "bool":
        return _same(op, left, right)
    return Compare(op, left, right)


def _same(op: CompareOp, left: Expr, right: Expr) -> Expr:
    """== or != of conditions: beside a constant the other one, or its negation."""
    for constant, other in ((left, right), (right, left)):
        if isinstance(constant, Const):
            return other if constant.value == (op == "==") else negate(other)
    return Compare(op, left, right)


def conj(*operands: Expr) -> Expr:
    """and: TRUE when empty."""
    flat = _flatten(operands, And)
    if FALSE in flat:
        return FALSE
    flat = tuple(operand for operand in flat if operand != TRUE)
    return And(flat) if len(flat) > 1 else flat[0] if flat else TRUE


def disj(*operands: Expr) -> Expr:
    """or: FALSE when empty."""
    flat = _flatten(operands, Or)
    if TRUE in flat:
        return TRUE
    flat = tuple(operand for operand in flat if operand != FALSE)
    return Or(flat) if len(flat) > 1 else flat[0] if flat else FALSE


def _flatten(operands: tuple[Expr, ...], kind: type[And] | type[Or]) -> tuple[Expr, ...]:
    """Operands of nested nodes of one kind, each once, in order of first appearance."""
    flat: dict[Expr, None] = {}
    for operand in operands:
        nested = operand.operands if isinstance(operand, kind) else (operand,)
        spend(len(nested))
        flat.update(dict.fromkeys(nested))
    return tuple(flat)


def negate(operand: Expr) -> Expr:
    """not, taken into a comparison where there is one."""
    match operand:
        case Const():
            return Const(not operand.value)
        case Not():
            return operand.operand
        case Compare():
            return Compare(NEGATED[operand.op], operand.left, operand.right)
        case _:
            return Not(operand)


def where(condition: Expr, then: Expr, other: Expr) -> Expr:
    """`then` if the condition holds, else `other`; bool branches become and/or."""
    chosen = then if condition == TRUE or then == other else other if condition == FALSE else None
    if chosen is not None and keeps_type(chosen, then) and keeps_type(chosen, other):
        return chosen
    if then.type == other.type == "bool":
        return disj(conj(condition, then), conj(negate(condition), other))
    return Call("where", (condition, then, other))
