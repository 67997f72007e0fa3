"""ir.Module -> the files that it becomes, whatever its target."""

from __future__ import annotations

from collections.abc import Mapping

from attnc.plan.ir import Module
from attnc.target.cuda_render import render_cuda
from attnc.target.render import render


def render_files(
    module: Module,
    *,
    path: str,
    sha256: str,
    tuned: Mapping[str, tuple[tuple[int | None, int], ...]] | None = None,
) -> dict[str, str]:
    """Name -> text, the Python module first. Arguments as for `render.render`."""
    name = module.variant.name
    if module.target == "triton":
        return {f"{name}.py": render(module, path=path, sha256=sha256, tuned=tuned)}
    files = render_cuda(module, path=path, sha256=sha256, tuned=tuned)
    return {f"{name}.py": files.host, f"{name}.cu": files.source}
