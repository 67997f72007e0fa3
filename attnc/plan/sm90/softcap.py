"""Capped scores, A tanh(c s), by a polynomial of three terms, without a test whether it may be used.

Up to |c s| = X it is as exact as tanh is elsewhere. Beyond, it leaves tanh, away from 0, and keeps growing:
so whether a score was beyond X is told by its probability, and that of many by their sum, which is asked for
anyway. What is far below -X becomes too small, by

    E = max over x > X of (1 - exp(-|A| (P(x) - tanh(x)))) exp(-|A| tanh(x))

at most, where all exponentials are taken of scores themselves. N of them are lost in a row whose exponentials
sum to N E / TAIL and more, which a tile of queries is asked at its end. Who cannot tell has the tile
computed again by tanh, as where a maximum moves too far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from attnc.expr.construct import add, mul
from attnc.expr.nodes import Binary, Call, Const, Dot, Expr, Neg

#: P(x) = x (a + b x^2 + c x^4), within 2^-21.5 of tanh for |x| <= X: the best such polynomial (Remez).
LIMIT = 0.33
POLYNOMIAL = (0.9999930414857937, -0.3328153463102691, 0.12361810804438467)
#: What is lost of a row's probabilities, which sum to 1.
TAIL = 2.0**-16
#: Arguments c s whose polynomial in s has ordinary float32 numbers for coefficients and powers.
_FACTORS = (2.0**-12, 2.0**12)
#: A sum of exponentials that rows of 2^14 keys have: caps that ask for more are left to tanh.
_ORDINARY_SUM, _ORDINARY_KEYS = 2.0**9, 2.0**14
_STEPS, _END, _LEAST = 1024, 4.0, 2.0**-80


@dataclass(frozen=True, slots=True)
class Cap:
    """A score A tanh(c s), in base 2: `size` is |A| log2(e) and `factor` c, with the sign of A. far: log2 of
    E.
    """

    size: float
    factor: float
    far: float

    @property
    def product(self) -> Expr:
        s = Dot()
        square = mul(s, s)
        coefficients = [Const(x * self.size * self.factor ** (2 * i + 1)) for i, x in enumerate(POLYNOMIAL)]
        inner: Expr = coefficients[-1]
        for coefficient in reversed(coefficients[:-1]):
            inner = add(coefficient, mul(square, inner))
        return mul(s, inner)

    @property
    def most(self) -> float:
        """What the polynomial is at X, or less by more than it is rounded by."""
        return self.size * polynomial(LIMIT) - 2.0**-10

    @property
    def least_sum(self) -> float:
        """log2 of what exponentials of a row have to sum to, for each of its keys."""
        return self.far - math.log2(TAIL)


def polynomial(x: float) -> float:
    a, b, c = POLYNOMIAL
    return x * (a + x * x * (b + x * x * c))


def cap_of(score: Expr, scale: float | None) -> Cap | None:
    """Returns the score so, times `scale`; None for any other, and where a polynomial would be of
    little use.
    """
    outer, call = _times(score)
    if not isinstance(call, Call) or call.function != "tanh":
        return None
    inner, dot = _times(call.args[0])
    if not isinstance(dot, Dot) or not _FACTORS[0] <= abs(inner) <= _FACTORS[1] or not outer:
        return None
    size = outer * (1.0 if scale is None else scale)
    far = math.log2(_bound_loss(abs(size) * math.log(2)))
    if far - math.log2(TAIL) + math.log2(_ORDINARY_KEYS) > math.log2(_ORDINARY_SUM):
        return None
    return Cap(abs(size), math.copysign(inner, inner * size), far)


def _times(expr: Expr) -> tuple[float, Expr]:
    match expr:
        case (
            Binary(op="*", left=Const(value=value), right=other)
            | Binary(op="*", left=other, right=Const(value=value))
        ):
            factor, rest = _times(other)
            return factor * float(value), rest
        case Neg(operand=operand):
            factor, rest = _times(operand)
            return -factor, rest
        case _:
            return 1.0, expr


def _bound_loss(cap: float) -> float:
    """E of |A| = cap, or a little more: between two points its factors are at most what they are at the
    second and at the first one, as both P - tanh and tanh grow.
    """
    points = [LIMIT + (_END - LIMIT) * i / _STEPS for i in range(_STEPS + 1)]
    found: Sequence[float] = [
        -math.expm1(-cap * (polynomial(y) - math.tanh(y))) * math.exp(-cap * math.tanh(x))
        for x, y in pairwise(points)
    ]
    return max(*found, math.exp(-cap * math.tanh(_END)), _LEAST)
