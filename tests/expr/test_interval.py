"""What integers can be, by brute force over random expressions of extreme inputs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.expr.evaluate import evaluate
from attnc.expr.interval import POSITION, SIZE, range_of
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
