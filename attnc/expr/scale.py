"""Multiplies a score by a constant without an extra multiplication per element, where that is possible."""

from __future__ import annotations

from attnc.expr.arithmetic import binary, div, mul, neg, number
from attnc.expr.logic import where
from attnc.expr.nodes import Binary, Call, Const, Dim, Dot, Expr, Index, Load, Neg, Param, children
from attnc.expr.simplify import make


def scale_by(expr: Expr, factor: float) -> Expr:
    """expr * factor with the factor folded into constants that are there already, and divisions by constants
    made products.

    Used to move a score to base 2: `cap * tanh(dot / a / cap)` costs no more multiplications than before, and
    in `dot * scale - slope[h] * abs(...)` the factor joins `scale` and the per-head `slope`.
    """
    return _scale(_reciprocals(expr), Const(float(factor)))


def _reciprocals(expr: Expr) -> Expr:
    """Every float `x / constant` as `x * (1 / constant)`: a division costs a GPU many multiplications."""
    operands = tuple(_reciprocals(child) for child in children(expr))
    if isinstance(expr, Binary) and expr.op == "/" and (divisor := number(operands[1])):
        left = operands[0]
        if left.type == "float":
            return mul(left, Const(1 / divisor))
    return make(expr, operands)


def _scale(expr: Expr, factor: Const) -> Expr:
    match expr:
        case Neg(operand=operand):
            return neg(_scale(operand, factor))
        case Binary(op="+" | "-" as op, left=left, right=right) if _absorbs(left) or _absorbs(right):
            return binary(op, _scale(left, factor), _scale(right, factor))
        case Binary(op="*", left=left, right=right):
            if _absorbs(left) or (not _absorbs(right) and not _is_scalar(right) and _is_scalar(left)):
                return mul(_scale(left, factor), right)
            if _absorbs(right) or _is_scalar(right):
                return mul(left, _scale(right, factor))
        case Binary(op="/", left=left, right=right):
            if _absorbs(left):
                return div(_scale(left, factor), right)
            if _is_scalar(right):
                return mul(left, div(factor, right))
        case Call(function="where", args=(condition, then, other)) if _absorbs(then) or _absorbs(other):
            return where(condition, _scale(then, factor), _scale(other, factor))
    return mul(expr, factor)


def _absorbs(expr: Expr) -> bool:
    """Whether a factor costs nothing at run time: it meets a constant."""
    match expr:
        case Const():
            return True
        case Neg(operand=operand):
            return _absorbs(operand)
        case Binary(op="*", left=left, right=right):
            return _absorbs(left) or _absorbs(right)
        case Binary(op="/", left=left):
            return _absorbs(left)
        case Binary(op="+" | "-", left=left, right=right):
            return _absorbs(left) and _absorbs(right)
        case _:
            return False


def _is_scalar(expr: Expr) -> bool:
    """Whether the value is one per head: computed once, outside the loops."""
    match expr:
        case Dot() | Param():
            return False
        case Index(name=name):
            return name in ("b", "h")
        case Dim() | Const():
            return True
        case Load(indices=indices):
            return all(_is_scalar(index) for index in indices)
        case _:
            return bool(children(expr)) and all(_is_scalar(child) for child in children(expr))
