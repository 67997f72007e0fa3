"""The order in which targets are tried."""

from __future__ import annotations

from attnc.plan.targets import TARGETS
from attnc.target.dispatch import fastest_first


def test_all_targets_have_a_place_in_the_order() -> None:
    assert fastest_first(TARGETS)[:2] == ["cuda.sm_90a", "triton"]
    some = ["cuda.sm_80", "cuda.sm_100", "cuda.sm_90"]
    assert fastest_first(some) == ["cuda.sm_100", "cuda.sm_90", "cuda.sm_80"]
    assert sorted(fastest_first(TARGETS)) == sorted(TARGETS)
