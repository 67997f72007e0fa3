"""Plans for Hopper."""

from __future__ import annotations

from typing import Any

from attnc.plan.ir import Module
from tests.plan import planning


def planned(schedule: str = "", **options: Any) -> Module:
    return planning.planned(schedule=f"  {schedule}", target="cuda.sm_90a", **options)
