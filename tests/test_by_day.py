"""Which cases run by day, and what a worker reports of a test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.by_day import _one_of_each_target, part_by_day
from tests.conftest import is_read

NIGHTLY = pytest.mark.nightly.mark


def part(
    *lists: int,
    of: int = 0,
    nightly: tuple[int, ...] = (),
    cases: int = 0,
    targets: int = 0,
    is_night: bool = False,
) -> Any:
    """The cases, numbered, of a test with lists of so many parameters, marked `one_in(of)`; `nightly`: those
    that are marked already; targets: how many take turns among the cases.
    """
    made = [pytest.mark.parametrize("x", range(length)).mark for length in lists]
    marks = {"one_in": pytest.mark.one_in(of).mark} if of else {}
    definition = SimpleNamespace(get_closest_marker=marks.get, iter_markers=lambda name: made)
    calls = [
        SimpleNamespace(
            number=number,
            marks=[NIGHTLY] if number in nightly else [],
            params={"at": number, **({"target": f"t{number % targets}"} if targets else {})},
        )
        for number in range(cases or lists[0])
    ]
    metafunc: Any = SimpleNamespace(definition=definition, _calls=calls)
    part_by_day(metafunc, is_night=is_night)
    return metafunc._calls


def numbers(calls: Any) -> list[int]:
    return [call.number for call in calls]


def test_one_in_n_runs_by_day() -> None:
    assert numbers(part(7, of=3)) == [0, 3, 6]
    assert numbers(part(7)) == [*range(7)]


def test_cases_of_the_night_are_not_counted() -> None:
    assert numbers(part(7, of=3, nightly=(0, 2, 3))) == [1, 6]


def test_lists_are_parted_along_diagonals() -> None:
    found = numbers(part(3, 3, of=3, cases=9))
    assert [divmod(number, 3) for number in found] == [(0, 0), (1, 2), (2, 1)]


def test_parameters_of_fixtures_are_one_more_list() -> None:
    assert numbers(part(2, 2, of=2, cases=8)) == [0, 3, 5, 6]


def test_every_target_has_a_case_by_day() -> None:
    """Also where fewer other arguments than `of` leave none on the diagonals, or several have the same."""
    assert numbers(part(2, 3, of=9, cases=6)) == [0]
    assert numbers(part(2, 3, of=9, cases=6, targets=3)) == [0, 1, 2]
    assert numbers(part(8, of=4, targets=2)) == [0, 1, 4]
    assert numbers(part(3, of=2, targets=3)) == [0, 1, 2]


def test_a_target_of_the_night_has_no_case_by_day() -> None:
    assert numbers(part(6, of=6, nightly=(1, 3, 5), targets=2)) == [0]


def test_a_case_for_a_target_has_other_arguments_too() -> None:
    calls = [
        SimpleNamespace(params={"form": form, "target": target}) for form in "ab" for target in ("x", "y")
    ]
    assert [*_one_of_each_target(calls, range(4), [0])] == [3]


def test_one_case_stays_where_all_run_by_night() -> None:
    (left,) = part(3, nightly=(0, 1, 2))
    assert left.marks == [NIGHTLY]


def test_all_run_by_night_and_are_marked() -> None:
    calls = part(7, of=3, is_night=True)
    assert numbers(call for call in calls if NIGHTLY not in call.marks) == [0, 3, 6]
    assert len(calls) == 7


@pytest.mark.parametrize(
    ("when", "changes", "expected"),
    [
        ("setup", {}, False),
        ("teardown", {}, False),
        ("call", {}, True),
        ("setup", {"outcome": "failed"}, True),
        ("setup", {"outcome": "skipped"}, True),
        ("teardown", {"outcome": "failed"}, True),
        ("setup", {"duration": 0.01}, True),
        ("teardown", {"sections": [("Captured stdout", "said")]}, True),
    ],
)
def test_workers_report_what_is_read(when: Any, changes: dict[str, Any], expected: bool) -> None:
    made: dict[str, Any] = {"outcome": "passed", "duration": 0.001, "sections": ()} | changes
    report = pytest.TestReport("a", ("a", 0, "a"), {}, longrepr=None, when=when, **made)
    assert is_read(report) is expected
