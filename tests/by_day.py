"""Cases of which some run by day, and all by night: `@pytest.mark.one_in(n)` above a parametrised test, or a
list of parameters made here, where cases need marks or names of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
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
    of a test marked `one_in(n)` but one in n, along diagonals where it has several lists of parameters, and
    one for each target that would have none.

    That is before pytest makes an item of each, which takes seconds. Where no case runs by day one stays, for
    a test without cases would be called without arguments; it is marked, and so runs by night alone.
    """
    calls = metafunc._calls  # has no public name
    by_day = _find_by_day(metafunc.definition, calls)
    if is_night:
        for number in {*range(len(calls))}.difference(by_day):
            calls[number].marks.append(pytest.mark.nightly.mark)
    elif len(by_day) < len(calls):
        metafunc._calls = [calls[number] for number in by_day] or calls[:1]


def _find_by_day(test: pytest.Item, calls: Sequence[Any]) -> list[int]:
    """Returns the numbers of the cases that run by day."""
    if test.get_closest_marker("nightly") is not None:
        return []
    left = [number for number, call in enumerate(calls) if all(mark.name != "nightly" for mark in call.marks)]
    mark = test.get_closest_marker("one_in")
    if mark is None:
        return left
    lists = [len([*made.args[1]]) for made in test.iter_markers("parametrize")]
    places = [_sum_places(number, lists) for number in left] if len(lists) > 1 else range(len(left))
    chosen = [number for number, place in zip(left, places, strict=True) if place % int(mark.args[0]) == 0]
    return sorted([*chosen, *_one_of_each_target(calls, left, chosen)])


def _one_of_each_target(calls: Sequence[Any], left: Sequence[int], chosen: Sequence[int]) -> Iterator[int]:
    """Yields a case for each target of those left that none of the chosen has: the first whose other
    arguments none of these has either, if there is one.
    """
    seen = {argument for number in chosen for argument in _arguments(calls[number])}
    arguments = {number: _arguments(calls[number]) for number in left}
    for target in dict.fromkeys(pair for pairs in arguments.values() for pair in pairs if _is_target(pair)):
        if target not in seen:
            cases = [number for number in left if target in arguments[number]]
            best = min(cases, key=lambda number: len(seen.intersection(arguments[number])))
            seen.update(arguments[best])
            yield best


def _arguments(call: Any) -> list[tuple[str, Hashable]]:
    """Returns the arguments of a case by name, those that are no plain values by their identity."""
    return [
        (name, value if isinstance(value, str | int | float) else id(value))
        for name, value in call.params.items()
    ]


def _is_target(argument: tuple[str, Hashable]) -> bool:
    return "target" in argument[0]


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
