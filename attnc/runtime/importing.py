"""Imports generated modules by path, under names such that each finds its support package.

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
            support = resource("support")
            import_once(f"{above}.{FOLDER}", support / "__init__.py", support)
    between = f"{above}.f{_digest(folder)}"
    _package(between, [])
    return _package(f"{between}.files", [str(folder)])


def import_once(name: str, path: Path, folder: Path | None = None) -> ModuleType:
    """The module in a file, imported under this name where it is not yet, without touching sys.path. folder:
    where a package has its modules. Raises what the file raises, and then nothing of it is left imported.
    """
    if name in sys.modules:
        return sys.modules[name]
    within = None if folder is None else [str(folder)]
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=within)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for loaded in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
            del sys.modules[loaded]
        raise
    return module


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:16]


def _package(name: str, path: list[str]) -> str:
    if name not in sys.modules:
        module = ModuleType(name)
        module.__path__ = path
        sys.modules[name] = module
    return name
