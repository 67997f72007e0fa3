"""Plans of the committed specs, and their texts, made once for all tests of a process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from attnc.build import Planned, digest, front, plan_program
from attnc.plan import ir
from attnc.target.files import render_files

#: The folder of the committed specs.
SPECS = Path(__file__).parent.parent / "specs"


def plans_of(spec: Path | str) -> Planned:
    """Plans the schedules of a spec file, or of the committed one of this name. Plans are frozen: tests share
    them.
    """
    return _plans_in(SPECS / f"{spec}.attn" if isinstance(spec, str) else spec)


@cache
def _plans_in(path: Path) -> Planned:
    return plan_program(front(path))


def files_of(module: ir.Module) -> Mapping[str, str]:
    """Renders a planned module: texts by name. Tests share those of a plan that they share."""
    known, files = _FILES.get(id(module), (None, {}))
    if known is not module:
        source = module.variant.source
        files = render_files(module, path=Path(source.path).name, sha256=digest(source))
        _FILES[id(module)] = module, files
    return files


#: By the identity of a plan, which lives as long: to compare plans would take as long as to render one.
_FILES: dict[int, tuple[ir.Module, Mapping[str, str]]] = {}


def module_of(spec: Path | str, target: str = "triton", variant: str | None = None) -> ir.Module:
    """Plans a module of a spec for a target: its first, or that of the variant with this name."""
    found = (module for module in plans_of(spec).modules if module.target == target)
    return next(module for module in found if variant in (None, module.variant.name))
