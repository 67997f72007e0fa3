"""Where a value may be no finite number, of every way that leads there."""

from __future__ import annotations

import math

import pytest

from attnc.expr.finite import has_pole, is_finite, is_never_below_0, may_exclude, outgrows
from attnc.expr.nodes import Binary, Call, Const, Dot, Expr, Index, Neg, Ref

DOT, KEY, INF = Dot(), Index("kv_idx"), Const(math.inf)
ONE, ZERO = Const(1.0), Const(0.0)
SLOPE, OF_ROW = Ref("slope", "float"), Ref("slope_q", "float", ("q",))


@pytest.mark.parametrize(
    ("value", "finite", "pole", "grows", "excludes"),
    [
        (Binary("+", KEY, Const(3)), True, False, False, False),
        (DOT, False, False, False, False),
        (Binary("/", DOT, Const(8.0)), False, False, False, False),
        (Binary("/", ONE, DOT), False, True, True, False),
        (Binary("/", ONE, Binary("+", DOT, ONE)), False, False, False, False),
        (Call("log", (DOT,)), False, True, True, True),
        (Call("log", (Binary("+", DOT, ONE),)), False, False, False, True),
        (INF, False, False, True, True),
        (Neg(INF), False, False, False, True),
        (Call("where", (Const(True), DOT, Neg(INF))), False, False, False, True),
        (Binary("*", Const(-2.0), Neg(INF)), False, False, True, True),
        (Binary("-", Neg(INF), Neg(INF)), False, False, True, True),
        (Call("max", (DOT, Neg(INF))), False, False, False, True),
        (Call("min", (DOT, INF)), False, False, False, True),
        (Binary("+", DOT, SLOPE), False, False, False, False),
        (Binary("*", SLOPE, DOT), False, False, False, False),
        (Binary("-", DOT, Binary("*", Binary("*", SLOPE, ONE), KEY)), False, False, True, False),
        (Binary("*", KEY, OF_ROW), False, False, False, False),
    ],
)
def test_what_may_be_no_finite_number(
    value: Expr, finite: bool, pole: bool, grows: bool, excludes: bool
) -> None:
    assert is_finite(value) == finite
    assert has_pole(value) == pole
    assert outgrows(value) == grows
    assert may_exclude(value) == excludes


def test_a_constant_is_infinite_where_a_factor_of_log2_e_makes_it_so() -> None:
    assert is_finite(Const(2e38))
    assert not is_finite(Const(3e38))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (ONE, True),
        (Const(-1.0), False),
        (DOT, False),
        *((Call(function, (DOT,)), True) for function in ("abs", "exp", "exp2", "sigmoid")),
        (Call("tanh", (DOT,)), False),
        (Call("max", (DOT, ZERO)), True),
        (Call("min", (Call("exp", (DOT,)), DOT)), False),
        (Binary("*", Call("exp", (DOT,)), ONE), True),
        (Binary("-", Call("exp", (DOT,)), ONE), False),
        (Binary("/", ONE, Call("exp", (DOT,))), True),
    ],
)
def test_what_is_never_below_0_but_may_be_nan(value: Expr, expected: bool) -> None:
    assert is_never_below_0(value) is expected
