"""Which terms of a score the tensor cores of Hopper add to its product."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import (
    And,
    Binary,
    BinaryOp,
    Call,
    Compare,
    Const,
    Dot,
    Expr,
    Index,
    Load,
    Neg,
    Ref,
    show,
)
from attnc.plan.sm90.scores import columns_of

S = Dot()
SLOPE = Ref("slope", "float")
BIAS = Load("bias", (Index("kv_idx"),), (), "float")
DISTANCE = Binary("-", Index("q_pos"), Index("kv_idx"))


def of(op: BinaryOp, left: Expr, right: Expr | float) -> Expr:
    return Binary(op, left, Const(right) if isinstance(right, float) else right)


HALF = of("*", S, 0.5)


@pytest.mark.parametrize(
    ("score", "product", "row", "terms"),
    [
        (
            of("-", HALF, of("*", SLOPE, DISTANCE)),
            "dot(q, k) * 0.5",
            "-(slope * (q_pos - kv_lo))",
            ["slope * 2.0"],
        ),
        (of("+", HALF, BIAS), "dot(q, k) * 0.5", None, ["bias[kv_idx] * 2.0"]),
        (of("-", BIAS, S), "-dot(q, k)", None, ["-bias[kv_idx]"]),
        (of("+", of("+", S, Index("kv_idx")), SLOPE), "dot(q, k)", "1.0 * kv_lo + slope", ["1.0"]),
        (Neg(of("-", S, of("*", BIAS, BIAS))), "-dot(q, k)", None, ["-(bias[kv_idx] * bias[kv_idx])"]),
    ],
)
def test_a_sum_is_a_product_a_row_and_columns(
    score: Expr, product: str, row: str | None, terms: list[str]
) -> None:
    found = columns_of(score)
    assert found is not None
    assert show(found.product) == product
    assert (found.row and show(found.row)) == row
    assert [show(x.factor if x.of_key is None else x.of_key) for x in found.terms] == terms


@pytest.mark.parametrize(
    "score",
    [
        S,
        of("+", S, SLOPE),
        of("+", S, of("*", SLOPE, Call("abs", (DISTANCE,)))),
        of("+", S, of("*", of("*", BIAS, SLOPE), DISTANCE)),
        of("+", S, of("*", SLOPE, of("*", Const(2), Index("kv_idx")))),
        of("+", of("*", S, BIAS), BIAS),
        of("+", of("*", S, 1e30), BIAS),
        of("+", of("+", of("+", S, BIAS), of("*", SLOPE, DISTANCE)), BIAS),
        Call("tanh", (of("+", S, BIAS),)),
    ],
)
def test_other_scores_are_computed_element_by_element(score: Expr) -> None:
    assert columns_of(score) is None


def test_a_mask_says_which_distances_are_positive() -> None:
    score = of("+", S, of("*", SLOPE, Call("abs", (DISTANCE,))))
    before = Compare("<=", Index("kv_idx"), Index("q_pos"))
    near = Compare("<", of("-", Index("q_pos"), Const(9)), Index("kv_idx"))
    for mask in (before, And((near, before)), And((before, near))):
        found = columns_of(score, mask)
        assert found is not None
        assert [show(x.factor) for x in found.terms] == ["-slope"]
    behind = Compare(">=", Index("kv_idx"), Index("q_pos"))
    found = columns_of(score, And((near, behind)))
    assert found is not None
    assert [show(x.factor) for x in found.terms] == ["slope"]
    assert columns_of(score, near) is None
    assert columns_of(score, Compare(">=", Index("kv_idx"), Index("q_idx"))) is None
