"""Planted bugs that no kernel on a CPU comes to: the cases of `attnc verify --large` show them."""

from __future__ import annotations

import pytest

from attnc.verify.subject import subject_of
from attnc.verify.trials import check_large
from tests.planted.hunting import large_case, planted
from tests.planted.registry import BUGS, module_of
from tests.planted.search import FOUND, read

LARGE = {
    name: line["dims"] for name, line in read(FOUND).items() if line is not None and line["by"] == "large"
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_case_shows_the_bug(name: str) -> None:
    bug = BUGS[name]
    clean = subject_of(module_of(bug.attention, bug.target))
    case = large_case(bug, LARGE[name])
    verdict = check_large(clean, case)
    assert verdict.ok, verdict.message
    assert verdict.worst > 0, f"nothing was computed: {case.to_json()}"
    wrong = planted(bug)
    assert isinstance(wrong, type(clean))
    verdict = check_large(wrong, case)
    assert not verdict.ok, f"{verdict.message}, worst {verdict.worst} at {verdict.where}"
