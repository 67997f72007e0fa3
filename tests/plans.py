"""Plans of the committed specs, made once for all tests of a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attnc.build import Planned, front, plan_program
from attnc.plan import ir

#: The folder of the committed specs.
SPECS = Path(__file__).parent.parent / "specs"


@cache
def plans_of(spec: Path | str) -> Planned:
    """Plans the schedules of a spec file, or of the committed one of this name. Plans are frozen: tests share
    them.
    """
    return plan_program(front(SPECS / f"{spec}.attn" if isinstance(spec, str) else spec))


def module_of(spec: Path | str, target: str = "triton", variant: str | None = None) -> ir.Module:
    """Plans a module of a spec for a target: its first, or that of the variant with this name."""
    found = (module for module in plans_of(spec).modules if module.target == target)
    return next(module for module in found if variant in (None, module.variant.name))
