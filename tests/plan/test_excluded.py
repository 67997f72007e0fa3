"""Which keys a mask excludes for all queries of a sequence, and which loops see to them."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import show
from attnc.plan.regions import kept_by_some
from tests.plan.excluding import inputs, kernel
from tests.plan.planning import planned
from tests.targets import TARGETS

#: mask -> what every key fulfils that some query keeps; None where nothing follows.
KEPT = {
    "true": None,
    "causal": None,
    "kv_idx >= first[b]": "kv_idx >= first[b]",
    "causal and kv_idx >= first[b]": "kv_idx >= first[b]",
    "valid[b, kv_idx] and (causal or kv_idx < end[b])": "valid[b, kv_idx]",
    "kv_idx < first[b] or kv_idx >= end[b]": "kv_idx < first[b] or kv_idx >= end[b]",
    "not (causal and kv_idx < first[b])": None,
    "causal and not (kv_idx < first[b])": "kv_idx >= first[b]",
    "(kv_idx < 4 or causal) and kv_idx < end[b]": "kv_idx < end[b]",
    "kv_idx < end[b] and q_idx < end[b]": "kv_idx < end[b]",
    "window(128, 0)": None,  # that all windows end somewhere costs more than it is worth
    "window(0, 3) and kv_idx >= first[b]": "kv_idx >= first[b]",
    "kv_idx < reach[h]": None,  # each head has keys of its own
    "window(reach[h], 0)": None,
    "doc[b, q_pos] == doc[b, kv_idx]": None,  # it would take another search
    "causal and end[b] > 3": None,  # says nothing of a single key
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("mask", "expected"), KEPT.items())
def test_what_follows_from_a_mask(mask: str, expected: str | None) -> None:
    kept = kept_by_some(planned(mask, inputs=inputs(mask)).variant.attention.mask)
    assert (None if kept is None else show(kept)) == expected


def fills(mask: str, target: str = "triton") -> list[tuple[bool, bool]]:
    """Of each loop, whether it may be partial, and whether its steps make rows zero."""
    loops = kernel(mask, target).regions.loops
    return [(loop.masked is not False, loop.zero_fill) for loop in loops]


def test_a_mask_that_excludes_no_key_costs_nothing() -> None:
    for mask in ("true", "causal", "doc[b, q_pos] == doc[b, kv_idx]"):
        assert not any(fill for _, fill in fills(mask))
        assert kernel(mask).step.kept is None


def test_full_tiles_are_left_alone() -> None:
    for target in TARGETS:
        assert fills("kv_idx < end[b]", target=target) == [(False, False), (True, True)]


def test_tiles_at_an_edge_have_a_loop_of_their_own_on_triton_alone() -> None:
    left, right = "causal and kv_idx >= first[b]", "causal and kv_idx < end[b]"
    assert fills(left) == [(True, True), (True, False)]
    assert fills(right) == [(False, False), (True, False), (True, True)]
    assert fills(left, target="cuda.sm_80") == [(True, True)]
    assert fills(right, target="cuda.sm_80") == [(False, False), (True, True)]


def test_where_any_tile_may_hold_such_keys_every_step_makes_them_zero() -> None:
    assert fills("valid[b, kv_idx]") == [(True, True)]
