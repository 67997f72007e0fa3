"""Cases of which some run by day, and all by night: `@pytest.mark.one_in(n)` above a parametrised test, or a
list of parameters made here, where cases need marks or names of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def each_by_day(cases: Iterable[Any], *, of: int) -> list[ParameterSet]:
    """Returns cases, or the arguments of each, as parameters, one in `of` of them by day."""
    made = [
        case
        if isinstance(case, ParameterSet)
        else pytest.param(*(case if isinstance(case, tuple) else (case,)))
        for case in cases
    ]
    return [_left_to_the_night(case) if at % of else case for at, case in enumerate(made)]


def some_by_day(*factors: Iterable[Any], of: int) -> list[ParameterSet]:
    """Returns every combination of the factors as parameters, one in `of` of them by day: along diagonals, so
    that each value of each factor is among these wherever another factor has `of` values.
    """
    values: list[Sequence[ParameterSet]] = [
        [value if isinstance(value, ParameterSet) else pytest.param(value) for value in factor]
        for factor in factors
    ]
    found = []
    for at in product(*(range(len(factor)) for factor in values)):
        parts = [factor[i] for factor, i in zip(values, at, strict=True)]
        together = [value for part in parts for value in part.values]
        marks = [mark for part in parts for mark in part.marks]
        case = pytest.param(*together, id="-".join(map(str, together)), marks=marks)
        found.append(_left_to_the_night(case) if sum(at) % of else case)
    return found


def left_to_the_night(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yields the cases of tests marked `one_in(n)` that do not run by day: one in n of the others does,
    along diagonals where a test has several lists of parameters.
    """
    seen: Counter[str] = Counter()
    for item in items:
        mark, spec = item.get_closest_marker("one_in"), getattr(item, "callspec", None)
        if mark is None or spec is None or item.get_closest_marker("nightly") is not None:
            continue
        lists = [len([*made.args[1]]) for made in item.iter_markers("parametrize")]
        if len(lists) > 1:
            rest, number = (
                next(iter(spec.indices.values())),
                0,
            )  # the place among all cases, which pytest counts
            for length in reversed(lists):
                rest, place = divmod(rest, length)
                number += place
        else:
            test = item.nodeid.partition("[")[0]
            number = seen[test]
            seen[test] += 1
        if number % int(mark.args[0]):
            yield item


def _left_to_the_night(case: ParameterSet) -> ParameterSet:
    return case._replace(marks=[*case.marks, pytest.mark.nightly])
