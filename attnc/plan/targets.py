"""All targets that are compiled, by the names that schedules give them. A new one is added to `_ALL`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attnc.plan.fitting import Shape
from attnc.plan.sm80 import SM80
from attnc.plan.sm90 import SM90A
from attnc.plan.target import Target
from attnc.plan.triton import TRITON

_ALL: tuple[Target, ...] = (TRITON, *SM80, SM90A)

#: By name; `model.resolve_schedule.TARGETS` has those too for which there are no kernels yet.
TARGETS: Mapping[str, Target] = MappingProxyType({target.name: target for target in _ALL})
#: What to write in place of a target that is not compiled yet.
INSTEAD = "a schedule for 'cuda.sm_80' runs on this architecture too"


def target_of(name: str) -> Target:
    """Returns the target that a schedule, or a module made for it, names. ValueError for one that is not
    compiled.
    """
    if name not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(sorted(TARGETS))}, got {name!r}")
    return TARGETS[name]


def schedule_for(attention: str, target: str, shape: Shape) -> str:
    """Returns the text of a schedule for an attention of this name."""
    body = "\n".join(f"  {line}" for line in target_of(target).default_schedule(shape))
    return f"schedule {attention} for {target} {{\n{body}\n}}\n"
