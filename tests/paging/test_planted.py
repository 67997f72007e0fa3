"""Random calls with operations that fail find every planted mistake of the page manager."""

from __future__ import annotations

import pytest

from tests.paging.planted import BUGS, Bug
from tests.paging.test_cache import run_all
from tests.replacing import replaced

FAILURES = (AssertionError, IndexError, ValueError, RuntimeError, pytest.fail.Exception)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_mistakes_are_found(bug: Bug) -> None:
    with replaced(f"attnc.paging.{bug.place}", bug.old, bug.new), pytest.raises(FAILURES):
        run_all()
