"""What Hopper kernels compute of a score once for a key or a row, and how they subtract the maximum."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import TRUE, Binary, Call, Const, Dot, Expr, Index, Load, Ref
from attnc.plan.ir import Fetch
from attnc.plan.sm90.hoisting import exponent, shared_score
from attnc.target.sm80.printer import at_row

S = Dot()
SLOPE, BIAS, GATE = Ref("slope", "float"), Ref("bias", "float", ("kv",)), Ref("gate", "float", ("kv",))
DISTANCE = Binary("-", Index("q_pos"), Index("kv_idx"))
VECTORS = tuple(
    Fetch(name=ref.name, load=Load(ref.name, (Index("kv_idx"),), (), "float"), axes=("kv",), guard=TRUE)
    for ref in (BIAS, GATE)
)


def times(left: Expr, right: Expr | float) -> Expr:
    return Binary("*", left, Const(right) if isinstance(right, float) else right)


def plus(left: Expr, right: Expr) -> Expr:
    return Binary("+", left, right)


@pytest.mark.parametrize(
    ("value", "left", "rows"),
    [
        (times(SLOPE, DISTANCE), "slope * (at_first[r] - column)", ["q_pos[r] - first_key"]),
        (
            plus(times(SLOPE, DISTANCE), times(S, Call("abs", (DISTANCE,)))),
            "slope * (at_first[r] - column) + s * fabsf(at_first[r] - column)",
            ["q_pos[r] - first_key"],
        ),
        (plus(S, plus(Index("kv_idx"), Const(3))), "s + (at_first + column)", ["first_key + 3"]),
        (plus(S, times(Const(3), Index("kv_idx"))), "s + 3 * (long long)kv_idx", []),
        (plus(S, Binary("//", Index("kv_idx"), Const(8))), "s + kv_idx / 8", []),
        (plus(S, Index("q_idx")), "s + q_idx[r]", []),
    ],
)
def test_integers_that_grow_with_the_key_become_floats_once(value: Expr, left: str, rows: list[str]) -> None:
    found = shared_score(value, (), ())
    assert at_row(found.value) == left
    assert [at_row(let.value) for let in found.rows] == rows


@pytest.mark.parametrize(
    ("value", "elsewhere", "left", "keys"),
    [
        (plus(S, times(BIAS, 2.0)), (), "s + of_key", ["bias * 2.0f"]),
        (plus(S, BIAS), (), "s + bias", []),
        (plus(times(S, plus(GATE, BIAS)), times(BIAS, 2.0)), (), "s * (gate + bias) + bias * 2.0f", []),
        (plus(S, times(BIAS, 2.0)), (BIAS,), "s + bias * 2.0f", []),
        (plus(times(S, GATE), times(BIAS, 2.0)), (GATE,), "s * gate + of_key", ["bias * 2.0f"]),
        (plus(S, times(times(BIAS, GATE), SLOPE)), (), "s + of_key", ["bias * gate * slope"]),
    ],
)
def test_what_is_of_the_key_alone_is_computed_once(
    value: Expr, elsewhere: tuple[Expr, ...], left: str, keys: list[str]
) -> None:
    """Unless it takes more room than what is loaded for it."""
    found = shared_score(value, VECTORS, elsewhere)
    assert at_row(found.value) == left
    assert [at_row(let.value) for let in found.keys] == keys


@pytest.mark.parametrize(
    ("value", "scale", "text"),
    [
        (plus(times(S, 2.0), BIAS), None, "s * 2.0f - m[r] + bias"),
        (plus(BIAS, times(S, 2.0)), None, "bias + (s * 2.0f - m[r])"),
        (Binary("-", times(S, 2.0), times(SLOPE, BIAS)), None, "s * 2.0f - m[r] - slope * bias"),
        (Binary("-", BIAS, times(S, 2.0)), None, "bias - s * 2.0f - m[r]"),
        (Call("tanh", (S,)), 4.0, "tanh_(s) * 4.0f - m[r]"),
    ],
)
def test_the_maximum_is_subtracted_where_the_product_is(value: Expr, scale: float | None, text: str) -> None:
    assert at_row(exponent(value, scale)) == text
