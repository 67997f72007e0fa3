"""Planted bugs that no kernel on a CPU comes to: the cases of `attnc verify --large` show them."""

from __future__ import annotations

import pytest

from attnc.verify.large import check_large, large_cases
from attnc.verify.subjects import subject_of
from tests.planted.hunting import planted
from tests.planted.registry import BUGS, module_of
from tests.planted.search import FOUND, read

LARGE = {
    name: line["cases"] for name, line in read(FOUND).items() if line is not None and line["by"] == "large"
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_case_shows_the_bug(name: str) -> None:
    bug = BUGS[name]
    clean = subject_of(module_of(bug.attention, bug.target))
    case = list(large_cases(clean.space))[LARGE[name] - 1]
    verdict = check_large(clean, case)
    assert verdict.ok, verdict.message
    wrong = planted(bug)
    assert isinstance(wrong, type(clean))
    assert not check_large(wrong, case).ok
