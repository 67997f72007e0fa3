"""What integers can be, by brute force over random expressions of extreme inputs."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.expr.evaluate import evaluate
from attnc.expr.interval import POSITION, SIZE, Range, _range_of_rounded, range_of
from attnc.expr.nodes import Expr, walk
from tests.expr.extremes import extreme, is_defined
from tests.expr.masks import Case, cases, ints
from tests.expr.soundness import check_classify
from tests.expr.spell import spell


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


#: Integers with bounds on both sides, on one, and on none.
SIDES = ("q_idx", "kv_idx", "max(tag[b, kv_idx], 2)", "min(tag[b, kv_idx], 2)", "tag[b, kv_idx]")
MADE_OF_ONE = (
    *("abs({0})", "-{0}", "{0} // 3", "{0} % 3", "{0} // -2", "{0} % -3", "{0} % N"),
    "{0} % width[h]",
)
MADE_OF_TWO = (
    "{0} * {1}",
    "{0} - 2 * {1}",
    "max({0}, {1})",
    "min({0}, {1})",
    "where(q_idx < kv_idx, {0}, {1})",
)


@settings(max_examples=2, deadline=None)
@given(cases())
def test_what_is_bounded_on_one_side_is_sound(case: Case) -> None:
    made = [shape.format(side) for shape, side in product(MADE_OF_ONE, SIDES)]
    made += [shape.format(*sides) for shape, *sides in product(MADE_OF_TWO, SIDES, SIDES)]
    for text, op in product(made, ("<=", ">")):
        check_classify(spell(f"{text} {op} 4"), case)
