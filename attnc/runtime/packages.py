"""Generated packages on disk: kept under a key, found again by other processes, imported from there.

A package is a folder of the cache with its modules and a manifest, which is written last and holds the hash
of every file: a folder that is half written, cut off or changed counts as not there. Files are replaced in
one step, and those of one key are the same whoever writes them, so processes need no lock.

Generated modules are imported by path, under names such that each finds its support package: a module says
`from ..._support import`, three packages up, where `attnc compile` puts a copy. A file that lies in such a
tree gets that copy; any other, like those in the cache, the one of this compiler.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from attnc.resources import resource
from attnc.support.cache import private_folder, store_bytes
from attnc.target.support import FOLDER

# --- imports by path ----------------------------------------------------------------------------------------


def package_of(folder: Path) -> str:
    """Returns the name of a package for the files of a folder, made where it is not there. Its `__init__.py`
    is not run.
    """
    folder = folder.resolve()
    root = folder.parent.parent
    if (root / FOLDER / "__init__.py").is_file():
        above = _above(root)
    else:
        above = "attnc_generated"
        if above not in sys.modules:
            _package(above, [])
            support = resource("support")
            import_once(f"{above}.{FOLDER}", support / "__init__.py", support)
    between = f"{above}.f{_digest(str(folder))[:16]}"
    _package(between, [])
    return _package(f"{between}.files", [str(folder)])


def _above(root: Path) -> str:
    """Returns the name of a package for a folder that has the support package in it."""
    return _package(f"attnc_generated_{_digest(str(root))[:16]}", [str(root)])


def import_once(name: str, path: Path, folder: Path | None = None) -> ModuleType:
    """Returns the module in a file, imported under this name where it is not yet, without touching sys.path.
    folder: where a package has its modules. Raises what the file raises, and then nothing of it is left
    imported.
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


def _package(name: str, path: list[str]) -> str:
    if name not in sys.modules:
        module = ModuleType(name)
        module.__path__ = path
        sys.modules[name] = module
    return name


# --- packages on disk ---------------------------------------------------------------------------------------


_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Texts of files by name, `__init__.py` among them, and what is to be known of them, as JSON has it."""

    files: Mapping[str, str]
    facts: Mapping[str, Any]


def find_package(folder: Path) -> Package | None:
    """Returns what `keep_package` put there; None where it did not, or where a file is not what it was.

    PermissionError for a folder that others could have written to.
    """
    private_folder(folder.parent)
    if not (folder.is_symlink() or folder.exists()):
        return None
    private_folder(folder)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files = {name: (folder / name).read_text(encoding="utf-8") for name in manifest["files"]}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if any(_digest(text) != manifest["files"][name] for name, text in files.items()):
        return None
    return Package(files=files, facts=manifest["facts"])


def keep_package(folder: Path, package: Package) -> None:
    """Writes a package to the folder where `find_package` did not find it."""
    private_folder(folder)
    for name, text in package.files.items():
        store_bytes(folder / name, text.encode())
    manifest = {
        "files": {name: _digest(text) for name, text in package.files.items()},
        "facts": package.facts,
    }
    store_bytes(folder / _MANIFEST, json.dumps(manifest, indent=1).encode())


def load_package(folder: Path) -> ModuleType:
    """Imports the package in a folder, once per process, under a name of its own."""
    return import_once(f"{package_of(folder)}_package", folder / "__init__.py", folder)


def load_attention(folder: Path) -> ModuleType:
    """Imports an attention beside the support package, `generated/NAME`, once per process; the packages
    of its targets are imported when they are called. Raises what its file raises.
    """
    return importlib.import_module(f"{_above(folder.resolve().parent)}.{folder.name}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
