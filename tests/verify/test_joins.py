"""Splits of many rows, which groups of threads join, have cases of their own."""

from __future__ import annotations

import pytest

from attnc.verify.check import check
from attnc.verify.cover import GROUPS_JOIN, Coverage
from attnc.verify.covering import cases_beside_the_array
from attnc.verify.simt import available
from attnc.verify.subject import subject_of
from tests.plans import module_of
from tests.verify.judging import subject_of_text, subject_with_changes

MANY = """attention many {
  input q: bf16[B, M, Hkv * G, 64]
  input k, v: bf16[B, N, Hkv, 64]
  score = dot(q, k)
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 64]
}
schedule many for cuda.sm_90a {
  loops = [kv], pack = gqa, split.kv = auto, overlap = true, tile.q = 128
}
"""


def test_splits_of_many_rows_are_joined_by_groups_of_threads() -> None:
    """Where that is, and coverage says so. A row has three splits with keys, each known to one group."""
    space = subject_of_text(MANY).space
    cases = [
        case for case in cases_beside_the_array(space, subject_of_text(MANY).limits()) if case.dims["G"] > 50
    ]
    coverage = Coverage(space)
    for case in cases:
        coverage.note(case)
    assert [m.met for m in coverage.summary.boundaries if m.boundary.axes == GROUPS_JOIN] == [(397,)]
    assert not subject_of(module_of("decode", "cuda.sm_90a")).space.many_rows


@pytest.mark.nightly
@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize(
    "change", [(), (("l *= first_weight;", ""),), (("m = fmaxf(m, statistics[", "m = (statistics["),)]
)
def test_a_group_under_a_maximum_of_its_own_shows(change: tuple[tuple[str, str], ...]) -> None:
    made = subject_with_changes(MANY, *change)
    (case,) = (c for c in cases_beside_the_array(made.space, made.limits()) if c.dims["G"] > 50)
    assert check(made, case).ok == (not change)
