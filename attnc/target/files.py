"""ir.Module -> the files that it becomes, whatever its target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from attnc.effort import remember
from attnc.plan.ir import Module
from attnc.plan.targets import target_of
from attnc.target.sm80.render import render_cuda
from attnc.target.sm90.render import render_sm90
from attnc.target.triton.render import render_triton
from attnc.tuned.choices import NOT_TUNED, Tuned


class Render(Protocol):
    """How the modules of a family of targets are printed."""

    def __call__(self, module: Module, *, path: str, sha256: str, tuned: Tuned = ...) -> dict[str, str]:
        """Returns files as `render_files` does."""


#: By the family of a target (`plan.target.Target.family`).
_RENDER: Mapping[str, Render] = {"triton": render_triton, "sm80": render_cuda, "sm90": render_sm90}


@remember()
def render_files(
    module: Module,
    *,
    path: str,
    sha256: str,
    tuned: Tuned = NOT_TUNED,
) -> dict[str, str]:
    """Returns texts by name, the Python module first.

    path: the spec's path as the header shows it; sha256: of the spec's text; tuned: of each kernel.
    """
    return _RENDER[target_of(module.target).family](module, path=path, sha256=sha256, tuned=tuned)
