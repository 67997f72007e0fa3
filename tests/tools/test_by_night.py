"""Which functions are proposed to leave the day."""

from __future__ import annotations

import pytest

from tools.by_night import propose
from tools.mutants.lines import Lines


def recorded(tests: dict[str, float], *lines: str) -> Lines:
    """lines: for each line of a module the last letters of the names of tests that run it."""
    ran = [frozenset(test for test in tests if test.partition("[")[0][-1] in letters) for letters in lines]
    return Lines(tests_of={"attnc/a.py": dict(enumerate(ran, 1))}, tests=tests)


def named(*letters: str, file: str = "tests/test_x.py") -> dict[str, float]:
    return {f"{file}::test_{letter}": 1.0 for letter in letters}


def test_what_runs_a_line_alone_stays() -> None:
    found = propose(recorded(named("a", "b", "c", "d", "e"), "ab", "c", "cde"))
    assert found.keys() == {f"tests/test_x.py::test_{letter}" for letter in "ade"}


def test_what_takes_most_leaves_first_and_what_takes_little_stays() -> None:
    tests = {"tests/x.py::test_a": 2.0, "tests/x.py::test_b": 3.0, "tests/y.py::test_c": 0.05}
    assert propose(recorded(tests, "ab")) == {"tests/x.py::test_b": 3.0}


def test_two_in_five_functions_of_a_file_stay() -> None:
    assert len(propose(recorded(named(*"abcde")))) == 3
    assert len(propose(recorded(named("a") | named("b", file="tests/test_y.py")))) == 0


def test_functions_that_have_left_count_among_those_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.by_night.read_listed", lambda: dict.fromkeys(named("x", "y"), 0))
    assert len(propose(recorded(named(*"abc")))) == 1


def test_cases_of_a_function_leave_together() -> None:
    tests = {"tests/x.py::test_a[1]": 0.1, "tests/x.py::test_a[2]": 0.15, "tests/x.py::test_b": 0.1}
    assert propose(recorded(tests, "ab")) == {"tests/x.py::test_a": 0.25}
    assert propose(recorded(tests, "a", "b")) == {}


def test_a_file_keeps_a_test_for_each_target() -> None:
    tests = {
        f"tests/x.py::test_{letter}[{target}]": 1.0
        for letter, target in zip("abcde", ("triton", "triton", "cuda.sm_80", "f16", "1-triton"), strict=True)
    }
    found = propose(recorded(tests))
    assert "tests/x.py::test_c" not in found
    assert len(found) == 3
    assert "tests/x.py::test_d" in found
