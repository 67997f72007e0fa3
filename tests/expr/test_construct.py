"""Constants as float32 holds them, and as they are printed."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.expr.construct import bit, compare, conj, disj, in_float32, negate
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import FALSE, TRUE, Call, Compare, CompareOp, Const, Dim, Expr, Index
from attnc.target.sm80.printer import scalar as cuda_scalar
from attnc.target.triton.printer import scalar

#: A constant, as CUDA and Triton print it.
CONSTANTS = {
    0.1: ("0.1f", "0.1"),
    -1e30: ("-1e+30f", "-1e+30"),
    2.0**-126: ("1.1754943508222875e-38f", "1.1754943508222875e-38"),
    2.0**-140: ("7.174648137343064e-43f", "tl.full([], 7.174648137343064e-43, tl.float32)"),
    1.1 * 2.0**-149: ("1.401298464324817e-45f", "tl.full([], 1.401298464324817e-45, tl.float32)"),
    1e-60: ("0.0f", "0.0"),
    -1e-60: ("-0.0f", "-0.0"),
    3.4028234663852886e38: ("3.4028234663852886e+38f", "3.4028234663852886e+38"),
    3.5e38: ("INF", 'float("inf")'),
    -1e300: ("-INF", '-float("inf")'),
}


@pytest.mark.parametrize("value", CONSTANTS)
def test_constants_are_those_of_float32(value: float) -> None:
    assert (cuda_scalar(Const(value)), scalar(Const(value))) == CONSTANTS[value]
    with np.errstate(over="ignore"):
        nearest = float(np.float32(value))
    normal = 2.0**-126 <= abs(value) <= 3.4028234663852886e38
    assert in_float32(value) == (value if normal else nearest)


CONDITION = Compare("<", Index("kv_idx"), Dim("N"))


@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize(
    ("op", "constant", "expected"),
    [
        ("==", TRUE, CONDITION),
        ("==", FALSE, negate(CONDITION)),
        ("!=", TRUE, negate(CONDITION)),
        ("!=", FALSE, CONDITION),
    ],
)
def test_a_condition_beside_a_constant(op: CompareOp, constant: Const, expected: Expr, is_left: bool) -> None:
    operands = (constant, CONDITION) if is_left else (CONDITION, constant)
    assert compare(op, *operands) == expected


@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
@pytest.mark.parametrize("op", ["<", "<=", ">", ">=", "==", "!="])
def test_an_integer_is_on_one_side_of_an_infinity(op: CompareOp, infinite: float) -> None:
    for operands in ((Const(float(infinite)), Index("kv_idx")), (Index("kv_idx"), Const(float(infinite)))):
        found = compare(op, *operands)
        for value in (-5, 0, 7):
            expected = evaluate(Compare(op, *operands), Env(indices={"kv_idx": value}))
            assert found == Const(bool(expected))


def test_joins_of_nothing_and_of_constants() -> None:
    assert (conj(), disj()) == (TRUE, FALSE)
    assert (conj(TRUE, CONDITION), disj(FALSE, CONDITION)) == (CONDITION, CONDITION)
    assert (conj(FALSE, CONDITION), disj(TRUE, CONDITION)) == (FALSE, TRUE)


WORD = Index("kv_idx")


@pytest.mark.parametrize(
    ("word", "place", "expected"),
    [
        (Const(6), Const(1), TRUE),
        (Const(6), Const(0), FALSE),
        (Const(-1), Const(63), TRUE),
        (Const(-1), Const(64), FALSE),
        (WORD, Const(-1), FALSE),
        (WORD, Const(64), FALSE),
        (Const(0), WORD, FALSE),
        (WORD, Const(63), Call("bit", (WORD, Const(63)))),
        (Const(1), WORD, Call("bit", (Const(1), WORD))),
    ],
)
def test_bits_that_are_known_are_constants(word: Expr, place: Expr, expected: Expr) -> None:
    assert bit(word, place) == expected
