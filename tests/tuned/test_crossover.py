"""Thresholds from measured times."""

from collections.abc import Mapping
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from attnc.model.program import IMPLS, Impl
from attnc.tune.projections import crossovers

ROWS = (1, 2, 4, 8)


def times(*rows: tuple[float, float, float]) -> Mapping[int, Mapping[Impl, float]]:
    return {M: dict(zip(IMPLS, row, strict=True)) for M, row in zip(ROWS, rows, strict=True)}


def test_thresholds_where_the_order_never_turns_back() -> None:
    found = crossovers(times((1, 2, 3), (3, 2, 3), (9, 2, 3), (9, 5, 3)))
    assert list(found.chosen.values()) == ["gemv", "flat", "flat", "conventional"]
    assert (found.first("flat"), found.first("conventional")) == (2, 8)
    assert found.notes() == ("M1 = 2, M2 = 8", "monotone at every M that was measured, to 1 %")


def test_an_exception_is_said_with_what_it_costs() -> None:
    found = crossovers(times((2, 1, 3), (1, 4, 4), (1, 4, 4), (9, 9, 3)))
    assert list(found.chosen.values()) == ["gemv", "gemv", "gemv", "conventional"]
    assert found.exceptions == ((1, "flat", 2.0),)
    assert "flat at M = 1 by 2.00x" in found.notes()[1]


def test_an_implementation_may_never_be_best() -> None:
    found = crossovers({1: {"flat": 1.0, "conventional": 2.0}, 2: {"flat": 1.0, "conventional": 2.0}})
    assert (found.first("flat"), found.first("conventional")) == (1, None)
    assert crossovers({1: {"gemv": 1.0}, 2: {"gemv": 1.0}}).notes()[0] == "M1 = none, M2 = none"


@given(st.lists(st.tuples(*[st.floats(1, 100)] * 3), min_size=4, max_size=4))
def test_the_choice_is_monotone_and_the_best_of_those(rows: list[tuple[float, float, float]]) -> None:
    measured = times(*rows)
    chosen = [IMPLS.index(impl) for impl in crossovers(measured).chosen.values()]
    assert chosen == sorted(chosen)

    def cost(choice: list[int]) -> float:
        return prod(measured[M][IMPLS[at]] for M, at in zip(ROWS, choice, strict=True))

    for cut in range(5):
        for second in range(cut, 5):
            other = [(i >= cut) + (i >= second) for i in range(4)]
            assert cost(chosen) <= cost(other) * (1 + 1e-9)
