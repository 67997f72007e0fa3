"""Reverse-mode derivative of a score with respect to dot(q, k), or of an epilogue with respect to the
attention, and to every value that it loads.

One sweep from the root to the leaves, multiplying local derivatives (Griewank and Walther, Evaluating
Derivatives, ch. 3). Masks of `where` and everything of type int are piecewise constant and end the sweep. At
a kink one side is taken: abs has derivative 0 at 0, min and max follow their first operand in a tie.

Derivatives are in a form that does not overflow where the function does not: that of sigmoid is s (1 - s).
"""

from __future__ import annotations

from dataclasses import dataclass

from attnc.expr.construct import add, div, floordiv, mul, neg, where
from attnc.expr.functions import REAL
from attnc.expr.nodes import Attended, Binary, Call, Compare, Const, Dot, Expr, Load, Neg
from attnc.expr.simplify import simplify

_ZERO, _ONE = Const(0.0), Const(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivative:
    """d score / d dot (of an epilogue, by the attention) and d score / d load, as expressions of the same
    leaves as the score.

    `loads` has one entry per distinct float Load, in order of appearance; a tensor loaded at two places has
    two. The gradient of its element is the sum over all scores that load it.
    """

    dot: Expr
    loads: tuple[tuple[Load, Expr], ...]


def derive(score: Expr) -> Derivative:
    """Returns the derivative of a float expression. Params must have been replaced; a Ref counts as a
    constant.
    """
    adjoints: dict[Expr, Expr] = {}
    _sweep(simplify(score), _ONE, adjoints)
    loads = tuple((leaf, adjoint) for leaf, adjoint in adjoints.items() if isinstance(leaf, Load))
    leaf: Expr = Attended() if Attended() in adjoints else Dot()
    return Derivative(dot=adjoints.get(leaf, _ZERO), loads=loads)


def _sweep(expr: Expr, adjoint: Expr, adjoints: dict[Expr, Expr]) -> None:
    if expr.type != "float" or adjoint == _ZERO:
        return
    match expr:
        case Dot() | Attended() | Load():
            adjoints[expr] = add(adjoints.get(expr, _ZERO), adjoint)
        case Neg(operand=operand):
            _sweep(operand, neg(adjoint), adjoints)
        case Binary():
            for operand, share in zip((expr.left, expr.right), _shares(expr, adjoint), strict=True):
                _sweep(operand, share, adjoints)
        case Call(function="where", args=(condition, then, other)):
            _sweep(then, where(condition, adjoint, _ZERO), adjoints)
            _sweep(other, where(condition, _ZERO, adjoint), adjoints)
        case Call(function="min" | "max" as function, args=(left, right)):
            takes_left = Compare("<=" if function == "min" else ">=", left, right)
            _sweep(left, where(takes_left, adjoint, _ZERO), adjoints)
            _sweep(right, where(takes_left, _ZERO, adjoint), adjoints)
        case Call(args=(operand,)):
            _sweep(operand, mul(adjoint, _slope(expr, operand)), adjoints)


def _shares(expr: Binary, adjoint: Expr) -> tuple[Expr, Expr]:
    left, right = expr.left, expr.right
    match expr.op:
        case "+":
            return adjoint, adjoint
        case "-":
            return adjoint, neg(adjoint)
        case "*":
            return mul(adjoint, right), mul(adjoint, left)
        case "/":
            return div(adjoint, right), neg(div(mul(adjoint, expr), right))
        case "//":
            return _ZERO, _ZERO
        case "%":  # left - right * (left // right)
            return adjoint, neg(mul(adjoint, floordiv(left, right)))


def _slope(expr: Call, operand: Expr) -> Expr:
    match expr.function:
        case "abs":
            negative = where(Compare("<", operand, _ZERO), Const(-1.0), _ZERO)
            return where(Compare(">", operand, _ZERO), _ONE, negative)
        case function:
            return REAL[function].slope(expr, operand)
