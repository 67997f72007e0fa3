"""Which integers take 64 bits, and which loads are brought near so that 32 are enough."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.expr.interval import I32, POSITION, range_of
from attnc.expr.nodes import Compare, Expr, Load, walk
from attnc.plan.width import is_wide, saturate_far
from tests.expr.extremes import extreme, is_defined
from tests.expr.masks import Case, cases, masks
from tests.expr.spell import spell


@pytest.mark.slow
@settings(max_examples=150)
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


def test_one_load_has_one_name_in_a_mask() -> None:
    made = saturate_far(spell("q_pos < prefix[b] and kv_idx < prefix[b] and kv_idx <= prefix[b] + q_pos"))
    assert len({node for node in walk(made) if isinstance(node, Load)}) == 1


@pytest.mark.parametrize("text", ["q_pos - kv_idx", "q_idx + N - M", "2 * kv_idx", "abs(q_pos - kv_idx) + 1"])
def test_sums_of_positions_fit_32_bits(text: str) -> None:
    (comparison,) = (node for node in walk(spell(f"{text} < 5")) if isinstance(node, Compare))
    assert range_of(comparison.left).is_within(I32)
    assert not is_wide(comparison.left)
