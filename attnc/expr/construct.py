"""Smart constructors: build a node, folding constants and identities on the way.

Each returns an expression of the same value *and type* as the plain node; floats are real numbers, so
constant factors may be reassociated. Order of operands is kept: the same input always gives the same
text. What would be no number, or overflow, is not folded: `model.variants` reports it where it is
written.

Comparisons of constants, and of integers with infinity, are decided, and nested `and` and `or` are one
node without repetitions, its operands in order of first appearance.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping

from attnc.effort import spend
from attnc.expr.nodes import (
    FALSE,
    TRUE,
    And,
    Binary,
    BinaryOp,
    Call,
    Compare,
    CompareOp,
    Const,
    Expr,
    Neg,
    Not,
    Or,
)

# --- numbers


ZERO, ONE = Const(0), Const(1)


def number(expr: Expr) -> int | float | None:
    """Returns the value of an int or float constant, else None."""
    if isinstance(expr, Const) and not isinstance(expr.value, bool):
        return expr.value
    return None


#: The largest float32, and the least that has all its bits.
MAX_FLOAT, LEAST_NORMAL = 2.0**128 - 2.0**104, 2.0**-126


def in_float32(value: float) -> float:
    """Returns the value that kernels have for a constant: beyond the normal numbers of float32 the nearest
    that it holds, which may be 0 or infinite. Digits of any other are left to compilers, which round all
    alike.
    """
    if value == 0 or not math.isfinite(value) or LEAST_NORMAL <= abs(value) <= MAX_FLOAT:
        return value
    try:
        (nearest,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(nearest)


def keeps_type(kept: Expr, dropped: Expr) -> bool:
    """Returns whether an operation on both has the type of `kept`, so that it may stand for the result."""
    return kept.type == dropped.type or (kept.type == "float" and dropped.type == "int")


def _is_sound(value: int | float, *of: int | float) -> bool:
    """Returns whether constants may be folded into this one: it is finite, or infinite because one of them
    is.
    """
    if isinstance(value, int) or math.isfinite(value):
        return True
    return math.isinf(value) and any(map(math.isinf, of))


def add(left: Expr, right: Expr) -> Expr:
    """Builds left + right."""
    a, b = number(left), number(right)
    if a is not None and b is not None and _is_sound(a + b, a, b):
        return Const(a + b)
    if b == 0 and keeps_type(left, right):
        return left
    if a == 0 and keeps_type(right, left):
        return right
    if isinstance(right, Neg):
        return sub(left, right.operand)
    if isinstance(right, Const) and right.type == "int":
        return _shift(left, int(right.value))
    return Binary("+", left, right)


def sub(left: Expr, right: Expr) -> Expr:
    """Builds left - right; 0 for two equal ints."""
    a, b = number(left), number(right)
    if a is not None and b is not None and _is_sound(a - b, a, b):
        return Const(a - b)
    if b == 0 and keeps_type(left, right):
        return left
    if a == 0 and keeps_type(right, left):
        return neg(right)
    if isinstance(right, Neg):
        return add(left, right.operand)
    if left == right and left.type == "int":
        return ZERO
    if isinstance(right, Const) and right.type == "int":
        return _shift(left, -int(right.value))
    return Binary("-", left, right)


def _shift(expr: Expr, offset: int) -> Expr:
    if isinstance(expr, Binary) and expr.type == "int" and isinstance(expr.right, Const):
        if expr.op == "+":
            return add(expr.left, Const(int(expr.right.value) + offset))
        if expr.op == "-":
            return add(expr.left, Const(offset - int(expr.right.value)))
    return Binary("+", expr, Const(offset)) if offset >= 0 else Binary("-", expr, Const(-offset))


def neg(operand: Expr) -> Expr:
    """Builds -operand, taken into a difference."""
    value = number(operand)
    if value is not None:
        return Const(-value)
    if isinstance(operand, Neg):
        return operand.operand
    if isinstance(operand, Binary) and operand.op == "-":
        return sub(operand.right, operand.left)
    return Neg(operand)


def mul(left: Expr, right: Expr) -> Expr:
    """Builds left * right, with constant factors merged."""
    a, b = number(left), number(right)
    if a is not None and b is not None:
        return Const(a * b) if _is_sound(a * b, a, b) else Binary("*", left, right)
    if b is not None:
        return _times(left, right, b)
    if a is not None:
        return _times(right, left, a, flipped=True)
    return Binary("*", left, right)


def _times(expr: Expr, factor: Expr, value: int | float, *, flipped: bool = False) -> Expr:
    """Returns expr * value (value * expr if `flipped`), merged with a constant factor that expr already
    has.
    """
    if keeps_type(expr, factor):
        if value == 1:
            return expr
        if value == -1:
            return neg(expr)
        if value == 0 and expr.type == "int":
            return ZERO
    if isinstance(expr, Binary):
        inner_left, inner_right = number(expr.left), number(expr.right)
        if expr.op == "*" and inner_right is not None and _is_sound(inner_right * value, inner_right, value):
            return mul(expr.left, Const(inner_right * value))
        if expr.op == "*" and inner_left is not None and _is_sound(inner_left * value, inner_left, value):
            return mul(Const(inner_left * value), expr.right)
        if expr.op == "/" and inner_right and _is_sound(value / inner_right, value):
            return mul(expr.left, Const(value / inner_right))
    return Binary("*", factor, expr) if flipped else Binary("*", expr, factor)


def div(left: Expr, right: Expr) -> Expr:
    """Builds left / right; x / (1 + exp(y)) becomes x * sigmoid(-y)."""
    a, b = number(left), number(right)
    if a is not None and b:
        return Const(a / b) if _is_sound(a / b, a) else Binary("/", left, right)
    if b == 1 and left.type == "float":
        return left
    if b and isinstance(left, Binary) and left.type == "float":
        inner_left, inner_right = number(left.left), number(left.right)
        if left.op == "*" and inner_right is not None and _is_sound(inner_right / b, inner_right):
            return mul(left.left, Const(inner_right / b))
        if left.op == "*" and inner_left is not None and _is_sound(inner_left / b, inner_left):
            return mul(Const(inner_left / b), left.right)
        if left.op == "/" and inner_right and _is_sound(inner_right * b, inner_right, b):
            return div(left.left, Const(inner_right * b))
    exponent = _exponent_beside_one(right)
    if exponent is not None:
        return mul(left, Call("sigmoid", (neg(exponent),)))
    return Binary("/", left, right)


def _exponent_beside_one(divisor: Expr) -> Expr | None:
    """Returns x of 1 + exp(x), the divisor of a sigmoid, which does not overflow, nor do its
    derivatives; None of anything else.
    """
    match divisor:
        case (
            Binary(op="+", left=Const(value=one), right=Call(function="exp", args=(x,)))
            | Binary(op="+", left=Call(function="exp", args=(x,)), right=Const(value=one))
        ) if one == 1:
            return x
        case _:
            return None


def floordiv(left: Expr, right: Expr) -> Expr:
    """Builds left // right, rounded down, by a divisor that is not a negative constant."""
    a, b = number(left), number(right)
    if a is not None and b:
        return Const(a // b)
    if b == 1 and left.type == right.type == "int":
        return left
    if b is not None and b < 0 and right.type == "int":
        return floordiv(neg(left), Const(-b))
    return Binary("//", left, right)


def mod(left: Expr, right: Expr) -> Expr:
    """Builds left % right, of the sign of the divisor, which is made positive if it is constant."""
    a, b = number(left), number(right)
    if a is not None and b:
        return Const(a % b)
    if b == 1 and left.type == right.type == "int":
        return ZERO
    if b is not None and b < 0 and right.type == "int":
        return neg(mod(neg(left), Const(-b)))
    return Binary("%", left, right)


_BINARY: Mapping[BinaryOp, Callable[[Expr, Expr], Expr]] = {
    "+": add, "-": sub, "*": mul, "/": div, "//": floordiv, "%": mod,
}  # fmt: skip


def binary(op: BinaryOp, left: Expr, right: Expr) -> Expr:
    """Builds left <op> right by the constructor of the operator."""
    return _BINARY[op](left, right)


def minimum(left: Expr, right: Expr) -> Expr:
    """Builds min(left, right)."""
    a, b = number(left), number(right)
    if a is not None and b is not None:
        return Const(min(a, b) if left.type == right.type else float(min(a, b)))
    return left if left == right else Call("min", (left, right))


def maximum(left: Expr, right: Expr) -> Expr:
    """Builds max(left, right)."""
    a, b = number(left), number(right)
    if a is not None and b is not None:
        return Const(max(a, b) if left.type == right.type else float(max(a, b)))
    return left if left == right else Call("max", (left, right))


# --- conditions


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
    for constant, other in ((left, right), (right, left)):
        if isinstance(constant, Const):
            return other if constant.value == (op == "==") else negate(other)
    return Compare(op, left, right)


def conj(*operands: Expr) -> Expr:
    """Returns all of them joined by `and`; TRUE when there are none."""
    flat = _flatten(operands, And)
    if FALSE in flat:
        return FALSE
    flat = tuple(operand for operand in flat if operand != TRUE)
    return And(flat) if len(flat) > 1 else flat[0] if flat else TRUE


def disj(*operands: Expr) -> Expr:
    """Returns all of them joined by `or`; FALSE when there are none."""
    flat = _flatten(operands, Or)
    if TRUE in flat:
        return TRUE
    flat = tuple(operand for operand in flat if operand != FALSE)
    return Or(flat) if len(flat) > 1 else flat[0] if flat else FALSE


def _flatten(operands: tuple[Expr, ...], kind: type[And] | type[Or]) -> tuple[Expr, ...]:
    flat: dict[Expr, None] = {}
    for operand in operands:
        nested = operand.operands if isinstance(operand, kind) else (operand,)
        spend(len(nested))
        flat.update(dict.fromkeys(nested))
    return tuple(flat)


def negate(operand: Expr) -> Expr:
    """Returns `not` of a condition, taken into a comparison where there is one: of floats into == and !=
    alone, since NaN is neither below nor above anything.
    """
    match operand:
        case Const():
            return Const(not operand.value)
        case Not():
            return operand.operand
        case Compare(op=op, left=left, right=right) if op in ("==", "!=") or "float" not in (
            left.type,
            right.type,
        ):
            return Compare(NEGATED[op], left, right)
        case _:
            return Not(operand)


#: Bits of an integer.
BITS = 64


def bit(word: Expr, place: Expr) -> Expr:
    """Builds bit(word, place): bit `place` of an integer in two's complement, the lowest first; false where
    there is none.
    """
    at = number(place)
    if at is not None and not 0 <= at < BITS:
        return FALSE
    bits = number(word)
    if at is not None and bits is not None:
        return Const(bool(int(bits) >> int(at) & 1))
    return FALSE if bits == 0 else Call("bit", (word, place))


def where(condition: Expr, then: Expr, other: Expr) -> Expr:
    """Returns `then` if the condition holds, else `other`; bool branches become and/or."""
    chosen = then if condition == TRUE or then == other else other if condition == FALSE else None
    if chosen is not None and keeps_type(chosen, then) and keeps_type(chosen, other):
        return chosen
    if then.type == other.type == "bool":
        return disj(conj(condition, then), conj(negate(condition), other))
    return Call("where", (condition, then, other))
