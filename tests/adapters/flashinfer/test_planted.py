"""Calls with every pair of arguments find every planted mistake."""

from __future__ import annotations

import pytest

from attnc.verify.memory import MemoryFault
from tests.adapters.flashinfer.planted import BUGS, Bug
from tests.adapters.flashinfer.test_pairs import CASES, run
from tests.replacing import replaced

FAILURES = (AssertionError, IndexError, RuntimeError, MemoryFault)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_mistakes_are_found(bug: Bug) -> None:
    place = f"attnc.adapters.flashinfer.{bug.place}"
    with replaced(place, bug.old, bug.new), pytest.raises(FAILURES):
        run_all(bug.call)


def run_all(function: str) -> None:
    for call, x in CASES:
        if call == function:
            run(call, x)
