"""ir.Module -> the files that it becomes, whatever its target."""

from __future__ import annotations

from attnc.plan.ir import Module
from attnc.plan.tuned import NOT_TUNED, Tuned
from attnc.target.render import render
from attnc.target.sm80.render import render_cuda


def render_files(
    module: Module,
    *,
    path: str,
    sha256: str,
    tuned: Tuned = NOT_TUNED,
) -> dict[str, str]:
    """Name -> text, the Python module first. Arguments as for `render.render`."""
    name = module.variant.name
    if module.target == "triton":
        return {f"{name}.py": render(module, path=path, sha256=sha256, tuned=tuned)}
    files = render_cuda(module, path=path, sha256=sha256, tuned=tuned)
    return {f"{name}.py": files.host, f"{name}.cu": files.source, **files.backward}
