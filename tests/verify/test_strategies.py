"""The cases that `fuzz` draws."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from attnc.verify.strategies import Limits, cases
from tests.plans import plans_of


def test_few_cases_have_no_sequence_however_little_they_may_cost() -> None:
    variant, counts = plans_of("causal_gqa").modules[0].variant, Counter[bool]()
    limits = Limits(tiles={0: (128, 128)}, work=1)

    @seed(1)
    @settings(
        max_examples=60, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        case = data.draw(cases(variant, limits))
        assert 0 in case.dims.values() or limits.cost(case.dims, case.config) == 1
        counts[case.dims["B"] == 0] += 1

    draw()
    assert 0 < counts[True] < counts[False] / 4, counts
