"""Targets that a schedule may name."""

from __future__ import annotations

from attnc.model.targets import TARGETS as NAMES
from attnc.plan.targets import TARGETS


def test_what_is_compiled_can_be_written_in_a_schedule() -> None:
    assert TARGETS.keys() <= set(NAMES)
