"""Names under which generated modules are imported by path, such that each finds its support package.

A module says `from ..._support import`: three packages up, where `attnc compile` puts a copy. A file that
lies in such a tree gets that copy; any other, like those in the cache, the one of this compiler.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from attnc.resources import resource
from attnc.target.support import FOLDER


def package_of(folder: Path) -> str:
    """The name of a package for the files of a folder, made where it is not there. Its `__init__.py` is not
    run.
    """
    folder = folder.resolve()
    root = folder.parent.parent
    if (root / FOLDER / "__init__.py").is_file():
        above = f"attnc_generated_{_digest(root)}"
        _package(above, [str(root)])
    else:
        above = "attnc_generated"
        if above not in sys.modules:
            _package(above, [])
            _load_support(f"{above}.{FOLDER}")
    between = f"{above}.f{_digest(folder)}"
    _package(between, [])
    return _package(f"{between}.files", [str(folder)])


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:16]


def _package(name: str, path: list[str]) -> str:
    if name not in sys.modules:
        module = ModuleType(name)
        module.__path__ = path
        sys.modules[name] = module
    return name


def _load_support(name: str) -> None:
    """Imports this compiler's support package under another name."""
    folder = resource("support")
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
