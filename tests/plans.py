"""Plans of the committed specs, made once for all tests of a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attnc.build import Planned, front, plan_program


@cache
def plans_of(path: Path) -> Planned:
    """What the schedules of a spec file plan. Plans are frozen: tests share them."""
    return plan_program(front(path))
