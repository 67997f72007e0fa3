"""Random calls with operations that fail find every planted mistake of the page manager: those that found it
before come first, and then all others.
"""

from __future__ import annotations

import pytest

from tests.paging.planted import BUGS, Bug
from tests.paging.test_cache import run_all
from tests.replacing import replaced

FAILURES = (AssertionError, IndexError, ValueError, RuntimeError, pytest.fail.Exception)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_mistakes_are_found(bug: Bug) -> None:
    with replaced(f"attnc.paging.{bug.place}", bug.old, bug.new), pytest.raises(FAILURES):
        run_from(bug.seed)


def run_from(seed: int) -> None:
    run_all(seed)
    run_all()
