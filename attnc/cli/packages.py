"""Packages that commands need besides Python's own: how each is installed, and what works without it.

Packages are named as PyPI has them: attnc itself is installed from a checkout, so no name on an index stands
for it or its extras.
"""

from __future__ import annotations

import importlib.util
import platform
import sys

from attnc.cli.console import Mistake

#: Names on PyPI by the module that is imported, where these differ or a choice belongs to them.
_ON_PYPI = {
    "cupy": "cupy-cuda13x (cupy-cuda12x for CUDA 12)",
    "lsprotocol": "pygls",
    "nvrtc": "nvidia-cuda-nvrtc",
}


def install(module: str) -> str:
    if not is_published_here(module):
        return f"PyPI has no {module} for {platform.system()}: {WITHOUT_TRITON}"
    return f"pip install {_ON_PYPI.get(module, module)}"


#: What there is where Triton is not.
WITHOUT_TRITON = (
    "'attnc check', 'compile' and 'explain' need none, and 'attnc verify --target cuda.sm_80' runs kernels of"
    " CUDA C++ on the CPU, by g++"
)


#: Modules whose packages are for Linux alone.
_FOR_LINUX = frozenset(("triton",))


def is_published_here(module: str) -> bool:
    """Returns whether PyPI has the package of a module for this system."""
    return module not in _FOR_LINUX or platform.system() == "Linux"


def is_installed(module: str) -> bool:
    """Returns whether there is such a module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def import_mistake(failure: ImportError) -> Mistake | None:
    """Returns the message about a package that is missing or broken; None if the module is attnc's own."""
    module = (failure.name or "").partition(".")[0]
    if module in ("", "attnc"):
        return None
    if module in sys.stdlib_module_names:
        return Mistake(
            f"this Python has no module '{module}', which the command needs", "attnc is tested on Linux"
        )
    if is_installed(module):
        return Mistake(f"'{module}' cannot be imported: {failure}", f"reinstall it: {install(module)}")
    hint = install(module)
    if module in _FOR_LINUX and is_published_here(module):
        hint = f"{hint}; without it {WITHOUT_TRITON}"
    return Mistake(f"the command needs '{module}', which is not installed", hint)
