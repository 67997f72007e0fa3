"""Masks of Hopper kernels as bits: which masks, and between which ends."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import And, Binary, Compare, CompareOp, Const, Dim, Expr, Index, Not, Or, Ref
from attnc.plan.sm90.hoisting import row_ends
from attnc.target.sm80.printer import at_row

KEY, POSITION, PREFIX = Index("kv_idx"), Index("q_pos"), Ref("prefix", "int", within=(0, 2**30 - 1))
DOC = Compare("==", Ref("doc_q", "int", ("q",)), Ref("doc_kv", "int", ("kv",)))


def compare(left: Expr, op: CompareOp, right: Expr) -> Compare:
    return Compare(op, left, right)


def minus(left: Expr, right: Expr | int) -> Expr:
    return Binary("-", left, Const(right) if isinstance(right, int) else right)


CAUSAL = compare(KEY, "<=", POSITION)
RECENT = compare(minus(POSITION, 512), "<=", KEY)


@pytest.mark.parametrize(
    ("mask", "first", "end"),
    [
        (CAUSAL, None, "q_pos[r] + 1"),
        (compare(POSITION, ">", KEY), None, "q_pos[r]"),
        (RECENT, "q_pos[r] - 512", None),
        (compare(KEY, ">", POSITION), "q_pos[r] + 1", None),
        (compare(minus(POSITION, KEY), "<", Const(7)), "q_idx[r] + N - M - 6", None),
        (And((RECENT, CAUSAL)), "q_pos[r] - 512", "q_pos[r] + 1"),
        (And((CAUSAL, compare(KEY, "<", Dim("N")))), None, "min(q_pos[r] + 1, N)"),
        (Or((CAUSAL, compare(KEY, "<", PREFIX))), None, "max(q_pos[r] + 1, prefix)"),
        (Or((RECENT, compare(KEY, ">=", PREFIX))), "min(q_pos[r] - 512, prefix)", None),
    ],
)
def test_intervals_have_ends(mask: Expr, first: str | None, end: str | None) -> None:
    found = row_ends(mask)
    assert found is not None
    assert (found.first and at_row(found.first), found.end and at_row(found.end)) == (first, end)


@pytest.mark.parametrize(
    "mask",
    [
        DOC,
        And((DOC, CAUSAL)),
        compare(KEY, "!=", POSITION),
        compare(KEY, "==", POSITION),
        compare(Binary("%", KEY, Const(4)), "<", Const(2)),
        compare(Binary("*", KEY, Const(2)), "<", POSITION),
        Or((compare(KEY, "<", PREFIX), compare(KEY, ">=", POSITION))),
        Or((And((RECENT, CAUSAL)), compare(KEY, "<", PREFIX))),
        Not(CAUSAL),
        compare(KEY, "<=", Ref("far", "int", within=(-(2**31), 2**31 - 1))),
    ],
)
def test_others_are_asked_of_every_element(mask: Expr) -> None:
    """A gap, two intervals, what another key says, and ends that 32 bits do not hold."""
    assert row_ends(mask) is None
