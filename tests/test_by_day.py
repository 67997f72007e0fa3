"""Which cases run by day, and what a worker reports of a test."""

from __future__ import annotations

import re
from itertools import count, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.by_day import LISTED, _one_of_each_target, is_listed, part_by_day, read_listed
from tests.conftest import _is_named, is_read
from tools.by_night import STAYING

NIGHTLY = pytest.mark.nightly.mark
FILES = count()
ROOT = Path(__file__).parents[1]


def part(
    *lists: int,
    of: int = 0,
    nightly: tuple[int, ...] = (),
    cases: int = 0,
    targets: int = 0,
    is_night: bool = False,
    is_named: bool = False,
    file: str = "",
    name: str = "tests/test_a.py::test_a",
) -> Any:
    """The cases, numbered, of a test with lists of so many parameters, marked `one_in(of)`; `nightly`: those
    that are marked already; targets: how many take turns among the cases; file: one for several tests;
    name: its id.
    """
    made = [pytest.mark.parametrize("x", range(length)).mark for length in lists]
    marks = {"one_in": pytest.mark.one_in(of).mark} if of else {}
    definition: Any = SimpleNamespace(
        get_closest_marker=marks.get, iter_markers=lambda name: made, nodeid=name
    )
    calls = [
        SimpleNamespace(
            number=number,
            marks=[NIGHTLY] if number in nightly else [],
            params={"at": number, **({"target": f"t{number % targets}"} if targets else {})},
        )
        for number in range(cases or lists[0])
    ]
    module = SimpleNamespace(__name__=file or f"file {next(FILES)}")
    metafunc: Any = SimpleNamespace(definition=definition, _calls=calls, module=module)
    part_by_day(metafunc, is_night=is_night, is_named=is_named)
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


def test_tests_of_a_file_share_the_targets() -> None:
    assert numbers(part(6, of=6, targets=3, file="a")) == [0, 1, 2]
    assert numbers(part(6, of=6, targets=3, file="a")) == [0]
    assert numbers(part(6, of=6, targets=3, file="b")) == [0, 1, 2]


def test_no_case_of_a_function_that_is_listed_runs_by_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.by_day.read_listed", lambda: {"tests/test_a.py::test_a": 0})
    assert numbers(part(3)) == [0], "which is left out by its name"
    assert [call.marks for call in part(3, is_night=True)] == [[NIGHTLY]] * 3
    assert numbers(part(3, is_named=True)) == [0, 1, 2]
    assert numbers(part(3, name="tests/test_a.py::test_b")) == [0, 1, 2]
    assert is_listed("tests/test_a.py::test_a[some case]")


def test_one_in_so_many_cases_of_a_function_that_is_listed_runs_by_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.by_day.read_listed", lambda: {"tests/test_a.py::test_a": 2})
    assert numbers(part(5)) == [0, 2, 4]
    assert numbers(part(9, of=3)) == [0, 6]
    assert numbers(part(4, targets=2)) == [0, 1, 2]
    assert not is_listed("tests/test_a.py::test_a[some case]")


def test_what_is_listed_is_there_and_a_file_keeps_tests_by_day() -> None:
    lines = [line for line in LISTED.read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
    listed = read_listed()
    assert len(listed) == len(lines)
    for path, names in groupby(sorted(listed), lambda name: name.partition("::")[0]):
        functions = set(re.findall(r"^def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE))
        of = {name.partition("::")[2]: listed[name] for name in names}
        assert of.keys() <= functions, f"{path} has none of this name any more"
        staying = sum(number != 0 for number in of.values()) + len(functions - of.keys())
        assert staying >= STAYING * len(functions)


def test_a_file_that_is_named_runs_all_its_cases() -> None:
    calls = part(7, of=3, nightly=(1, 2), is_named=True)
    assert numbers(calls) == [*range(7)]
    assert not any(call.marks for call in calls)


@pytest.mark.parametrize(
    ("arguments", "mark", "expected"),
    [
        (["tests/test_by_day.py"], "", True),
        (["tests/test_by_day.py::test_one_in_n_runs_by_day", "tests/plan"], "", True),
        (["tests/test_by_day.py"], "quick", False),
        (["tests"], "", False),
        (["tests/test_docs.py"], "", False),
    ],
)
def test_files_are_named_by_arguments(arguments: list[str], mark: str, expected: bool) -> None:
    config: Any = SimpleNamespace(
        args=arguments,
        option=SimpleNamespace(markexpr=mark),
        invocation_params=SimpleNamespace(dir=Path(__file__).parents[1]),
    )
    assert _is_named(config, Path(__file__)) is expected


def test_a_target_of_the_night_has_no_case_by_day() -> None:
    assert numbers(part(6, of=6, nightly=(1, 3, 5), targets=2)) == [0]


def test_a_case_for_a_target_has_other_arguments_too() -> None:
    calls = [
        SimpleNamespace(params={"form": form, "target": target}) for form in "ab" for target in ("x", "y")
    ]
    assert [*_one_of_each_target(calls, range(4), [0], ())] == [3]
    assert [*_one_of_each_target(calls, range(4), [0], ("y",))] == []


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
