"""Where a value may be no finite number: by what it reads, divides by or takes the logarithm of, and by its
infinite constants.
"""

from __future__ import annotations

import math

from attnc.expr.construct import in_float32, number
from attnc.expr.functions import REAL
from attnc.expr.nodes import Binary, Call, Const, Dot, Expr, Index, Load, Neg, Ref, walk
from attnc.expr.simplify import substitute

_ANY = frozenset({math.inf, -math.inf, math.nan})


def is_finite(value: Expr) -> bool:
    """Returns whether the value is a finite number wherever its indices are: it reads nothing and divides by
    nothing.
    """
    return not any(
        isinstance(node, Dot | Load)
        or (isinstance(node, Ref) and node.type == "float")
        or (isinstance(node, Binary) and node.op == "/")
        or (isinstance(node, Call) and node.function in REAL and REAL[node.function].has_pole is not None)
        or _is_infinite(node)
        for node in walk(value)
    )


def has_pole(value: Expr) -> bool:
    """Returns whether the value may be no finite number at zeros, which is what rows and keys past the end
    are loaded as.
    """
    return any(map(_may_be_pole, walk(value)))


def outgrows(score: Expr) -> bool:
    """Returns whether the score may be +inf or no number at zeros, so that exp2(score - inf) is not 0. The
    -inf of an excluded key does no harm. An infinite number that multiplies a position, such as a slope, may
    make another of it than of rows that exist.
    """
    return (
        has_pole(score) or not _infinities(score) <= {-math.inf} or any(map(_scales_a_position, walk(score)))
    )


def may_exclude(score: Expr) -> bool:
    """Returns whether the score may be -inf, which excludes a key: by an input, a constant, or a logarithm of
    0.
    """
    return any(
        (isinstance(node, Load) and node.type == "float")
        or _is_infinite(node)
        or (isinstance(node, Call) and node.function in REAL and _may_be_minus_infinity(node.function))
        for node in walk(score)
    )


def is_never_below_0(value: Expr) -> bool:
    """Returns whether a float is 0 or more wherever it is a number."""
    match value:
        case Const(value=constant):
            return constant >= 0
        case Call(function="abs"):
            return True
        case Call(function="max", args=args):
            return any(map(is_never_below_0, args))
        case Call(function="min", args=args):
            return all(map(is_never_below_0, args))
        case Call(function=function) if function in REAL:
            return REAL[function].low >= 0
        case Binary(op="+" | "*" | "/", left=left, right=right):
            return is_never_below_0(left) and is_never_below_0(right)
    return False


def _may_be_pole(node: Expr) -> bool:
    match node:
        case Binary(op="/", right=right):
            return not _at_zeros(right)  # unknown, or 0
        case Call(function=function, args=(x,)) if function in REAL:
            has_pole, at = REAL[function].has_pole, _at_zeros(x)
            return has_pole is not None and (at is None or has_pole(at))
        case _:
            return False


def _scales_a_position(node: Expr) -> bool:
    """Returns whether it is a product of something with positions and of a float that kernels hold. A float
    of each row is 0 past the end.
    """
    if not isinstance(node, Binary) or node.op != "*":
        return False
    pairs = ((node.left, node.right), (node.right, node.left))
    return any(any(map(_is_held, walk(a))) and any(map(_is_position, walk(b))) for a, b in pairs)


def _is_held(node: Expr) -> bool:
    return isinstance(node, Ref) and node.type == "float" and "q" not in node.axes


def _is_position(node: Expr) -> bool:
    return isinstance(node, Index) or (isinstance(node, Ref) and node.type == "int" and bool(node.axes))


def _may_be_minus_infinity(function: str) -> bool:
    return REAL[function].low == -math.inf and REAL[function].has_pole is not None


def _at_zeros(value: Expr) -> float | None:
    found = number(substitute(value, {Dot(): Const(0.0)}))
    return None if found is None else float(found)


def _is_infinite(node: Expr) -> bool:
    """Returns whether it is a constant that kernels take for an infinite one, with a factor of log2(e)."""
    value = number(node)
    return isinstance(value, float) and math.isinf(in_float32(value * math.log2(math.e)))


def _infinities(value: Expr) -> frozenset[float]:
    """Returns the values that infinite constants in an expression may give it: +inf, -inf, NaN."""
    match value:
        case Const(value=constant):
            infinite = isinstance(constant, float) and _is_infinite(value)
            return frozenset({math.copysign(math.inf, constant)} if infinite else ())
        case Neg(operand=operand):
            return frozenset(-end for end in _infinities(operand))
        case Binary(op="+" | "-" as op, left=left, right=right):
            ends = _infinities(left), _infinities(right if op == "+" else Neg(right))
            opposed = any(-end in ends[1] for end in ends[0] if math.isinf(end))
            return ends[0] | ends[1] | ({math.nan} if opposed else frozenset())
        case (
            Binary(op="*", left=Const(value=factor), right=rest)
            | Binary(op="*" | "/", left=rest, right=Const(value=factor))
        ) if factor and math.isfinite(factor):
            return frozenset(end * math.copysign(1, factor) for end in _infinities(rest))
        case Call(function="where", args=(_, first, second)):
            return _infinities(first) | _infinities(second)
        case Call(function="min" | "max" as function, args=(first, second)):
            ends = _infinities(first), _infinities(second)
            absorbing = -math.inf if function == "min" else math.inf
            return (ends[0] & ends[1]) | {end for end in ends[0] | ends[1] if end != -absorbing}
        case _:
            return _ANY if any(map(_is_infinite, walk(value))) else frozenset()
