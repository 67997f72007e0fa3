"""Which tests run by day, and which by night alone: one rule for three ways of saying it.

What is left to the night is alike: tests by day run every line of `attnc` that it runs; each file, which is
about one kind of kernel or of code, runs for each target that its cases name, and keeps two in five of its
functions. Every command, door, committed spec and golden, and more than 260 planted bugs stay.

- `@pytest.mark.one_in(n)` above a parametrised test: one in n of its cases runs by day;
- a list of parameters made here, where cases need marks or names of their own;
- `tests/by_night.txt`: functions of which no case runs by day, for what they take, or one in so many of them.

A file that is named on the command line (`pytest tests/kernels/test_sinks.py`) runs all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
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


LISTED = Path(__file__).with_name("by_night.txt")


@cache
def read_listed() -> Mapping[str, int]:
    """What is listed, as `tests/plan/test_width.py::test_a_name`: of its cases one in how many runs by day, 0
    where none does.
    """
    lines = LISTED.read_text(encoding="utf-8").splitlines()
    words = [line.partition(" one in ") for line in lines if line and not line.startswith("#")]
    return {name: int(of or 0) for name, _, of in words}


def is_listed(name: str) -> bool:
    """Whether a test is one of a function of which no case runs by day, by its id."""
    return read_listed().get(name.partition("[")[0]) == 0


def part_by_day(metafunc: pytest.Metafunc, *, is_night: bool, is_named: bool = False) -> None:
    """Leaves out the cases of a test that run by night alone, or marks them `nightly` if it is night: those
    of a test marked `one_in(n)` but one in n, along diagonals where it has several lists of parameters, and
    one for each target that no case of its file had before. None of a file that is named.

    That is before pytest makes an item of each, which takes seconds. Where no case runs by day one stays, for
    a test without cases would be called without arguments; it is marked, and so runs by night alone.
    """
    calls = metafunc._calls  # has no public name
    if is_named:
        for call in calls:
            call.marks[:] = [mark for mark in call.marks if mark.name != "nightly"]
        return
    by_day = _find_by_day(metafunc.definition, calls, _TARGETS[metafunc.module.__name__])
    if is_night:
        for number in {*range(len(calls))}.difference(by_day):
            calls[number].marks.append(pytest.mark.nightly.mark)
    elif len(by_day) < len(calls):
        metafunc._calls = [calls[number] for number in by_day] or calls[:1]


#: The targets that cases by day of a test file have, as far as it is collected.
_TARGETS: defaultdict[str, set[str]] = defaultdict(set)


def _find_by_day(test: pytest.Item, calls: Sequence[Any], targets: set[str]) -> list[int]:
    """Returns the numbers of the cases that run by day, and adds their targets to those of the file."""
    if test.get_closest_marker("nightly") is not None or is_listed(test.nodeid):
        return []
    left = [number for number, call in enumerate(calls) if all(mark.name != "nightly" for mark in call.marks)]
    mark, of, chosen = test.get_closest_marker("one_in"), read_listed().get(test.nodeid, 1), left
    if mark is not None:
        lists = [len([*made.args[1]]) for made in test.iter_markers("parametrize")]
        places = [_sum_places(number, lists) for number in left] if len(lists) > 1 else range(len(left))
        chosen = [
            number for number, place in zip(left, places, strict=True) if place % int(mark.args[0]) == 0
        ]
    if mark is not None or of > 1:
        chosen = chosen[::of]
        chosen = sorted([*chosen, *_one_of_each_target(calls, left, chosen, targets)])
    targets.update(target for number in chosen for target in _targets(calls[number]))
    return chosen


def _one_of_each_target(
    calls: Sequence[Any], left: Sequence[int], chosen: Sequence[int], targets: Iterable[str]
) -> Iterator[int]:
    """Yields a case for each target of those left that neither the chosen nor other tests of the file have:
    the first whose other arguments none of the chosen has either, if there is one.
    """
    seen = {argument for number in chosen for argument in _arguments(calls[number])}
    known = {*targets, *(target for number in chosen for target in _targets(calls[number]))}
    for target in dict.fromkeys(target for number in left for target in _targets(calls[number])):
        if target not in known:
            cases = [number for number in left if target in _targets(calls[number])]
            best = min(cases, key=lambda number: len(seen.intersection(_arguments(calls[number]))))
            seen.update(_arguments(calls[best]))
            yield best


def _arguments(call: Any) -> list[tuple[str, Hashable]]:
    """Returns the arguments of a case by name, those that are no plain values by their identity."""
    return [
        (name, value if isinstance(value, str | int | float) else id(value))
        for name, value in call.params.items()
    ]


def _targets(call: Any) -> list[str]:
    return [str(value) for name, value in call.params.items() if "target" in name]


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
