"""Statistics of samples; the clock itself needs a GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.runtime.timing import summarise


def test_median_and_spread() -> None:
    timing = summarise([1.0, 1.1, 0.9, 1.0, 5.0])
    assert timing.median == 1.0
    assert (timing.low, timing.high) == (0.9, 5.0)
    assert timing.spread == pytest.approx(4.1)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_quantiles_are_in_order(samples: list[float]) -> None:
    timing = summarise(samples)
    assert min(samples) <= timing.low <= timing.median <= timing.high <= max(samples)
