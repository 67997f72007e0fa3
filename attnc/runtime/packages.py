"""Generated packages on disk: kept under a key, found again by other processes, imported from there.

A package is a folder of the cache with its modules and a manifest, which is written last and holds the hash
of every file: a folder that is half written, cut off or changed counts as not there. Files are replaced in
one step, and those of one key are the same whoever writes them, so processes need no lock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from attnc.runtime.cache import private_folder, store_bytes
from attnc.runtime.importing import import_once, package_of

_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Texts of files by name, `__init__.py` among them, and what is to be known of them, as JSON has it."""

    files: Mapping[str, str]
    facts: Mapping[str, Any]


def find_package(folder: Path) -> Package | None:
    """What `keep_package` put there; None where it did not, or where a file is not what it was.

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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
