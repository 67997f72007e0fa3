"""Cases of which some run by day, and all by night: `@pytest.mark.one_in(n)` above a parametrised test, or a
list of parameters made here, where cases need marks or names of their own.
"""

from __future__ import annotations

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


def part_by_day(metafunc: pytest.Metafunc, *, is_night: bool) -> None:
    """Leaves out the cases of a test that run by night alone, or marks them `nightly` if it is night: those
    of a test marked `one_in(n)` but one in n, along diagonals where it has several lists of parameters.

    That is before pytest makes an item of each, which takes seconds. Where no case runs by day one stays, for
    a test without cases would be called without arguments; it is marked, and so runs by night alone.
    """
    calls = metafunc._calls  # has no public name
    later = [*_find_left_out(metafunc.definition, calls)]
    if is_night:
        for number in later:
            calls[number].marks.append(pytest.mark.nightly.mark)
    elif later:
        left_out = {*later}
        kept = [call for number, call in enumerate(calls) if number not in left_out]
        metafunc._calls = kept or calls[:1]


def _find_left_out(test: pytest.Item, calls: Sequence[Any]) -> Iterator[int]:
    """Yields the numbers of the cases that do not run by day."""
    if test.get_closest_marker("nightly") is not None:
        yield from range(len(calls))
        return
    mark = test.get_closest_marker("one_in")
    lists = [len([*made.args[1]]) for made in test.iter_markers("parametrize")] if mark else []
    by_day = 0
    for number, call in enumerate(calls):
        if any(mark.name == "nightly" for mark in call.marks):
            yield number
        elif mark is not None:
            place = _sum_places(number, lists) if len(lists) > 1 else by_day
            by_day += 1
            if place % int(mark.args[0]):
                yield number


def _sum_places(number: int, lists: Sequence[int]) -> int:
    """Returns the sum of the places in lists of so many parameters of a case, given its number among all, and
    that of the parameters of fixtures, which pytest varies last.
    """
    total = 0
    for length in reversed(lists):
        number, place = divmod(number, length)
        total += place
    return total + number


def _left_to_the_night(case: ParameterSet) -> ParameterSet:
    return case._replace(marks=[*case.marks, pytest.mark.nightly])
