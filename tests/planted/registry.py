"""All planted bugs, and the planned modules that they are planted in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from attnc.build import Planned, front, plan_program
from attnc.plan import ir
from attnc.plan.ir_projection import ProjectionModule
from tests.planted import (
    cuda_backward,
    cuda_backward_tiles,
    cuda_f32,
    cuda_forward,
    cuda_serving,
    projections,
    triton_backward,
    triton_forward,
    triton_serving,
)
from tests.planted.bug import Bug

PARTS: Mapping[str, tuple[Bug, ...]] = {
    "triton forward": triton_forward.BUGS,
    "triton serving": triton_serving.BUGS,
    "triton backward": triton_backward.BUGS,
    "cuda forward": cuda_forward.BUGS,
    "cuda serving": cuda_serving.BUGS,
    "cuda backward": cuda_backward.BUGS,
    "cuda backward tiles": cuda_backward_tiles.BUGS,
    "cuda f32": cuda_f32.BUGS,
    "projections": projections.BUGS,
}
#: By `part: name`, which is how data and tests call them.
BUGS: Mapping[str, Bug] = {f"{part}: {bug.name}": bug for part, bugs in PARTS.items() for bug in bugs}

_SPECS = Path(__file__).parents[2] / "specs"
_DEFINED = re.compile(r"^(?:attention|projection) (\w+)", re.M)


@cache
def planned(name: str) -> Planned:
    """The modules of the spec file that defines this attention or projection."""
    return plan_program(front(_files()[name]))


@cache
def module_of(attention: str, target: str) -> ir.Module:
    """The first module of the attention for the target."""
    modules = planned(attention).modules
    return next(m for m in modules if (m.target, m.variant.attention.name) == (target, attention))


def projection_of(name: str) -> ProjectionModule:
    """The first module of the projection."""
    return next(m for m in planned(name).projections if m.name == name)


@cache
def _files() -> dict[str, Path]:
    return {
        name: path
        for path in sorted(_SPECS.glob("*.attn"))
        for name in _DEFINED.findall(path.read_text(encoding="utf-8"))
    }
