"""The error analysis of scores: float32 evaluations keep it, and it says where nothing is promised."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from attnc.expr.nodes import Binary, Call, Compare, Const, Dot, Expr, Neg
from attnc.plan.error_bound import INTRINSICS
from attnc.reference import Head
from attnc.verify.running_error import Approx, RunningError
from tests.expr.spell import spell
from tests.specimens import attention

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs, "min": np.minimum, "max": np.maximum, "where": np.where, "sqrt": np.sqrt,
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "tanh": np.tanh,
    "sin": np.sin, "cos": np.cos,
    "sigmoid": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)),
    "erf": np.vectorize(lambda x: np.float32(math.erf(x)), otypes=[np.float32]),
}  # fmt: skip
#: Scores, and whether something is promised of every product between -1e4 and 1e4.
SCORES = {
    "dot(q, k) / (1 + exp(-dot(q, k)))": True,
    "dot(q, k) / (2 + exp(-dot(q, k)))": True,
    "dot(q, k) * sigmoid(dot(q, k) * 1.702)": True,
    "dot(q, k) * dot(q, k)": True,
    "dot(q, k) * (1 + erf(dot(q, k) / sqrt(2))) / 2": True,
    "min(max(exp(dot(q, k)), 0.25), 30)": True,
    "sin(dot(q, k)) + cos(dot(q, k) * dot(q, k)) / 3": True,
    "exp2(-abs(dot(q, k))) + log2(dot(q, k) * dot(q, k) + 1)": True,
    "log(1 + exp(-abs(dot(q, k)))) + max(dot(q, k), 0)": True,
    "tanh(exp(dot(q, k))) + 1 / (1 + exp(dot(q, k)) * exp(dot(q, k)))": True,
    "sqrt(abs(dot(q, k))) + abs(dot(q, k)) % 3 + where(dot(q, k) < 2.5, -dot(q, k), 1)": True,
    "max(dot(q, k), -inf) + min(dot(q, k), inf)": True,
    "exp(dot(q, k)) - exp(dot(q, k)) * 2": False,
    "exp(dot(q, k)) * exp(-dot(q, k))": False,
    "log(1 + exp(dot(q, k)))": False,
    "exp(dot(q, k)) / exp(dot(q, k) + 1)": False,
}


def single(expr: Expr, dot: Any) -> Any:
    """A float32 evaluation."""
    match expr:
        case Dot():
            return dot
        case Const(value=value):
            return np.float32(value)
        case Neg(operand=operand):
            return -single(operand, dot)
        case Binary(op=op, left=left, right=right):
            a, b = single(left, dot), single(right, dot)
            return {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "%": np.mod}[op](a, b)
        case Compare(op="<", left=left, right=right):
            return single(left, dot) < single(right, dot)
        case Call(function=function, args=args):
            return _FUNCTIONS[function](*(single(arg, dot) for arg in args))
    raise ValueError(expr)


def analysed(expr: Expr, dots: Any, error: Any = 0.0) -> Approx:
    """Of one query, and as many keys as there are products."""
    count = len(dots)
    head = Head(
        attention(expr), 0, 0, 0, np.zeros((1, 8)), np.zeros((count, 8)), np.zeros((count, 8)), {}, {}
    )
    dot = Approx(dots[None, :], np.broadcast_to(error, (1, count)))
    return RunningError(head, dot, {name: (own, absolute) for name, own, absolute in INTRINSICS}).analyse(
        expr
    )


#: Products where functions bend, saturate and overflow, and what lies between.
DOTS = np.concatenate([
    [0.0, 1e-38, 1e-30, 2.0**-24, 0.5, 2.5, 3.0, 87.3, 88.7, 88.8, 89.0, 103.0, 104.5, 127.0, 128.0, 710.0],
    np.linspace(0, 12, 97), np.linspace(84, 110, 53), np.geomspace(1e-6, 1e4, 61),
])  # fmt: skip


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("text", SCORES)
def test_single_precision_keeps_the_bound(text: str, shift: int) -> None:
    """Also of products that are themselves wrong by a few units."""
    expr, dots = spell(text), np.concatenate([DOTS, -DOTS]).astype(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        near = (dots * (1 + shift * 2.0**-24)).astype(np.float32)
        found = analysed(expr, dots, np.abs(near - dots))
        got = np.asarray(single(expr, near), np.float64)
        value, error = np.broadcast_to(found.value, (1, len(dots)))[0], found.error[0]
        assert not np.isnan(error).any()
        off = np.where(got == value, 0.0, np.abs(got - value))
    promised = np.isfinite(error) & ~found.overflows[0]
    assert (off[promised] <= 1.01 * error[promised]).all()
    if SCORES[text]:
        assert promised.all()


@pytest.mark.parametrize("text", [text for text, always in SCORES.items() if not always])
def test_what_meets_infinity_is_not_promised(text: str) -> None:
    found = analysed(spell(text), np.array([1.0, 200.0, 500.0]))
    assert list(np.isfinite(found.error[0]) & ~found.overflows[0]) == [True, False, False]
