"""What integers can be, by brute force over random expressions of extreme inputs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.expr.evaluate import evaluate
from attnc.expr.interval import POSITION, SIZE, Range, _range_of_rounded, range_of
from attnc.expr.nodes import Expr, walk
from tests.expr.extremes import extreme, is_defined
from tests.expr.masks import Case, cases, ints


@settings(max_examples=150)
@given(ints(3), cases(), st.integers(0, 2**16))
def test_values_are_in_their_ranges(expr: Expr, case: Case, seed: int) -> None:
    case = extreme(case, seed)
    for node in walk(expr):
        if node.type == "int" and is_defined(node):
            values, found = evaluate(node, case.env), range_of(node)
            assert found.lo <= values.min(), node
            assert values.max() <= found.hi, node


def test_sizes_leave_room_for_a_tile() -> None:
    assert SIZE + 1024 == POSITION + 1 == 2**30


@given(st.integers(-9, 9), st.integers(0, 9), st.integers(-3, 5), st.integers(0, 4))
def test_rounded_numbers_stay_on_their_side_of_zero(lo: int, width: int, least: int, more: int) -> None:
    whole, size = Range(lo, lo + width), Range(least, least + more)
    found = _range_of_rounded(whole, size)
    for x in range(whole.lo, whole.hi + 1):
        for step in range(size.lo, size.hi + 1):
            assert found.lo <= (x // step * step if step else 0) <= found.hi
    if size.lo > 0:
        assert found.hi == whole.hi
        assert found.lo >= 0 or whole.lo < 0
