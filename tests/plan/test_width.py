"""Which integers take 64 bits, and which loads are brought near so that 32 are enough."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.expr.interval import I32, POSITION, Range, range_of
from attnc.expr.nodes import Call, Compare, Expr, Load, Ref, show, walk
from attnc.plan.width import bound_places, is_wide, may_overflow, narrow_bound, saturate_far, shifts_wide
from tests.expr.extremes import extreme, is_defined
from tests.expr.masks import Case, cases, masks
from tests.expr.spell import spell


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 2)
@given(masks(2), cases(), st.integers(0, 2**16))
def test_what_is_brought_near_compares_as_before(mask: Expr, case: Case, seed: int) -> None:
    if is_defined(mask):
        case = extreme(case, seed)
        assert np.array_equal(case.kept(mask), case.kept(saturate_far(mask)))


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        ("kv_idx <= q_pos + width[h]", POSITION),
        ("q_pos - width[h] <= kv_idx", POSITION),
        ("kv_idx <= kv_len[b]", POSITION),
        ("kv_idx < q_pos + 2 * width[h]", POSITION // 2 + 1),
        ("kv_idx < kv_len[b]", None),  # nothing is added to it
        ("kv_idx + kv_len[b] < q_pos + prefix[b]", None),  # two of them: in 64 bits
        ("3 * kv_idx < q_pos + width[h]", None),
    ],
)
def test_which_loads_are_brought_near(mask: str, most: int | None) -> None:
    made = saturate_far(spell(mask))
    limits = {node.within for node in walk(made) if isinstance(node, Load)}
    assert limits == {None if most is None else (-most, most)}
    wide = any(is_wide(node) for node in walk(made))
    assert wide == (most is None and "<= " not in mask and mask != "kv_idx < kv_len[b]")


@pytest.mark.parametrize("text", ["-kv_len[b]", "abs(kv_len[b])"])
def test_the_opposite_of_the_least_integer_is_wide(text: str) -> None:
    """-(-2^31) is no integer of 32 bits; that of a position is one."""
    assert is_wide(spell(text))
    assert not is_wide(spell(text.replace("kv_len[b]", "q_pos")))


@pytest.mark.parametrize(
    ("bound", "near"),
    [
        ("q_pos", "q_pos"),  # as near as positions are
        ("kv_len[b]", "max(min(kv_len[b], N), 0)"),
        ("q_pos + 2 * N", "min(q_pos + 2 * N, N)"),
    ],
)
def test_a_bound_is_brought_near_where_it_may_be_far(bound: str, near: str) -> None:
    assert show(narrow_bound(spell(bound), spell("N"))) == near


@pytest.mark.parametrize(
    ("mask", "made"),
    [
        ("q_pos - 2147483647 <= kv_idx and kv_idx <= q_pos", "kv_idx <= q_pos"),
        ("kv_idx <= q_pos + 4294967296 or kv_idx < kv_len[b]", "true"),
        ("kv_idx - q_pos > 2147483647", "false"),
        ("q_pos != kv_idx + 2147483648", "true"),
        ("kv_idx < 1073741823", None),  # a position of a last tile, behind the end
        ("kv_idx < kv_len[b] + 2147483647", None),
    ],
)
def test_constants_beyond_all_positions_decide(mask: str, made: str | None) -> None:
    assert saturate_far(spell(mask)) == spell(made or mask)


def test_one_load_has_one_name_in_a_mask() -> None:
    made = saturate_far(spell("q_pos < prefix[b] and kv_idx < prefix[b] and kv_idx <= prefix[b] + q_pos"))
    assert len({node for node in walk(made) if isinstance(node, Load)}) == 1


@pytest.mark.parametrize("text", ["q_pos - kv_idx", "q_idx + N - M", "2 * kv_idx", "abs(q_pos - kv_idx) + 1"])
def test_sums_of_positions_fit_32_bits(text: str) -> None:
    (comparison,) = (node for node in walk(spell(f"{text} < 5")) if isinstance(node, Compare))
    assert range_of(comparison.left).is_within(I32)
    assert not is_wide(comparison.left)


@pytest.mark.slow
@settings(max_examples=100)
@given(masks(2), cases(), st.integers(0, 2**16))
def test_bits_are_those_at_the_places_that_words_have(mask: Expr, case: Case, seed: int) -> None:
    case = extreme(case, seed)
    bounded = bound_places(mask)
    assert np.array_equal(case.kept(mask), case.kept(bounded))
    bits = (node for node in walk(bounded) if isinstance(node, Call) and node.function == "bit")
    assert all(range_of(bit.args[1]).is_within(Range(0, 63)) for bit in bits)


@pytest.mark.parametrize(
    ("text", "bounded", "wide"),
    [
        ("bit(tag[b, kv_idx // 32], kv_idx % 32)", "bit(tag[b, kv_idx // 32], kv_idx % 32)", False),
        ("bit(tag[b, 0], kv_idx % 33)", "bit(tag[b, 0], kv_idx % 33)", True),
        ("bit(limit[b], 3)", "bit(limit[b], 3)", True),
        ("bit(kv_idx, 63)", "bit(kv_idx, 63)", True),
        ("bit(tag[b, 0], q_idx)", "0 <= q_idx and q_idx < 64 and bit(tag[b, 0], q_idx % 64)", True),
    ],
)
def test_where_a_word_has_64_bits(text: str, bounded: str, wide: bool) -> None:
    made = bound_places(spell(text))
    assert show(made).replace("0 <= q_idx < 64", "0 <= q_idx and q_idx < 64") == bounded
    (bit,) = (node for node in walk(made) if isinstance(node, Call))
    assert shifts_wide(*bit.args) == wide


@pytest.mark.parametrize("op", ["+", "-", "*", "//"])
@pytest.mark.parametrize("left", [(0, 1), (-(2**31), 2**31 - 1), (2**30, 2**30), (-(2**33), 5)])
@pytest.mark.parametrize("right", [(1, 1), (2, 3), (-(2**30), 2**30), (2**32, 2**40)])
def test_what_leaves_32_bits_is_wide(op: str, left: tuple[int, int], right: tuple[int, int]) -> None:
    """And what is made of that; of each operand the ends of its range."""
    made = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "//": int.__floordiv__}[op]
    results = [made(x, y) for x in left for y in right if op != "//" or y]
    ends = [*left, *right, *results, *([-x for x in left] if op == "//" and right[0] < 0 else [])]
    is_far = any(not -(2**31) <= x < 2**31 for x in ends)
    x, y = (
        Ref(name, "int", within=ends, wide=not ends[0] >= -(2**31) or ends[1] >= 2**31)
        for name, ends in (("x", left), ("y", right))
    )
    assert may_overflow(op, x, y) == is_far
    assert not may_overflow("/", x, y)
    assert not may_overflow(op, Ref("z", "float"), y)
    assert not may_overflow(op, x, Ref("z", "float"))
