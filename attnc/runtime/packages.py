"""Generated packages: kept on disk under a key, found again by other processes, imported.

A package is a folder of the cache with its modules and a manifest, which is written last. That holds the hash
of every file, what is to be known of them, and a hash of both: a folder that is half written, cut off or
changed counts as not there. Files are replaced atomically, and every process writes the same files for one
key, so processes need no lock.

A module is imported from a text that has been read and checked. It gets a name below `attnc_generated`, where
nothing is looked for on disk: what `from ..._support import` or `from . import` means there are modules of
this process, the support package of this compiler and texts that came with the module, and never a file that
happens to lie beside or above it. Bytecode is neither read nor written.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import linecache
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from attnc.resources import resource
from attnc.runtime.locks import renew_in_forks
from attnc.support.cache import discard_path, read_private, store_bytes
from attnc.support.folders import private_folder
from attnc.target.support import FOLDER

# --- imports of texts ---------------------------------------------------------------------------------------


_ROOT = "attnc_generated"


class _Text(SourceLoader):
    """Loads a module from its text. Triton, tracebacks and `inspect` see the same text."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path, self.content = str(path), content

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str | bytes) -> bytes:
        return self.content

    def exec_module(self, module: ModuleType) -> None:
        text = importlib.util.decode_source(self.content)
        lines = text.splitlines(keepends=True)
        linecache.cache[self.path] = len(text), None, lines, self.path  # None: never looked up again
        super().exec_module(module)


class _Texts(MetaPathFinder):
    """Finds what is imported by a name below `attnc_generated`: texts that were given for it."""

    def __init__(self) -> None:
        self.known: dict[str, _Text] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        loader = self.known.get(fullname)
        if loader is None:
            return None
        spec = importlib.util.spec_from_file_location(fullname, loader.path, loader=loader)
        if spec is not None and spec.submodule_search_locations is not None:
            spec.submodule_search_locations = []  # not the folder of the file
        return spec


_TEXTS = _Texts()
#: Held while a module is imported: another thread finds it whole, or makes what it belongs to once.
_IMPORTING = threading.RLock()
renew_in_forks(globals(), "_IMPORTING")


def import_text(path: Path, content: bytes) -> ModuleType:
    """Imports a module from its text, once per process for each path: that of the file that the text comes
    from, or would be in. Raises what the text raises; then nothing of it stays imported.
    """
    with _IMPORTING:
        name = f"{_folder_name(path.parent)}.files.{path.stem}"
        return _import(name, {name: _Text(path, content)})


def import_package(folder: Path, files: Mapping[str, str]) -> ModuleType:
    """Imports a package, once per process for a folder. files: its modules, `__init__.py` among them. Raises
    as `import_text` does.
    """
    texts = {Path(file): text.encode() for file, text in files.items() if file.endswith(".py")}
    with _IMPORTING:
        name = f"{_folder_name(folder)}.files_package"
        names = {file: name if file.stem == "__init__" else f"{name}.{file.stem}" for file in texts}
        return _import(name, {names[file]: _Text(folder / file, text) for file, text in texts.items()})


def _import(name: str, texts: Mapping[str, _Text]) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    _TEXTS.known.update(texts)
    try:
        return importlib.import_module(name)
    except BaseException:
        for loaded in texts:
            sys.modules.pop(loaded, None)
        raise


def _folder_name(folder: Path) -> str:
    """Returns the name of a package for the files of a folder, made where it is not there: two below that of
    the support package, as modules expect it.
    """
    if _ROOT not in sys.modules:
        _package(_ROOT)
        sys.meta_path.insert(0, _TEXTS)
        support = resource("support")
        own = importlib.util.spec_from_file_location(
            f"{_ROOT}.{FOLDER}", support / "__init__.py", submodule_search_locations=[str(support)]
        )
        assert own is not None
        assert own.loader is not None
        sys.modules[own.name] = importlib.util.module_from_spec(own)
        own.loader.exec_module(sys.modules[own.name])
    between = f"{_ROOT}.f{_digest(str(folder))[:16]}"
    _package(between)
    _package(f"{between}.files")
    return between


def _package(name: str) -> None:
    if name not in sys.modules:
        module = ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module


# --- packages on disk ---------------------------------------------------------------------------------------


_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Texts of files by name, `__init__.py` among them, and what is to be known of them, as JSON has it."""

    files: Mapping[str, str]
    facts: Mapping[str, Any]


def find_package(folder: Path) -> Package | None:
    """Returns the package that `keep_package` put there; None if it did not, or if a file has changed.
    PermissionError for a folder that others could have written to.
    """
    for level in (folder.parent, folder):
        if level.is_file() and not level.is_symlink():
            return None
        if level == folder and not (folder.is_symlink() or folder.exists()):
            return None
        private_folder(level)
    try:
        text = _text(folder / _MANIFEST)
        manifest = json.loads(text)
        if text != _format_manifest(manifest) or manifest.pop("sha256") != _seal(folder, manifest):
            return None
        files = {name: _text(folder / name) for name in manifest["files"]}
    except (LookupError, ValueError, TypeError, AttributeError):
        return None
    if any(_digest(text) != manifest["files"][name] for name, text in files.items()):
        return None
    return Package(files=files, facts=manifest["facts"])


def keep_package(folder: Path, package: Package) -> None:
    """Writes a package to the folder where `find_package` did not find it. Raises OSError."""
    for level in (folder.parent, folder):
        if level.is_file() and not level.is_symlink():
            discard_path(level)
        private_folder(level)
    for name, text in package.files.items():
        store_bytes(folder / name, text.encode())
    manifest: dict[str, Any] = {
        "files": {name: _digest(text) for name, text in package.files.items()},
        "facts": dict(package.facts),
    }
    whole = {**manifest, "sha256": _seal(folder, manifest)}
    store_bytes(folder / _MANIFEST, _format_manifest(whole).encode())


def load_package(folder: Path, package: Package) -> ModuleType:
    """Imports a package that is kept in a folder, once per process, under a name of its own. Its `.cu` files
    are not read again.
    """
    module = import_package(folder, package.files)
    sources = {name: text for name, text in package.files.items() if name.endswith(".cu")}
    for name in package.files:
        keep_sources(getattr(module, name.removesuffix(".py"), None), sources)
    return module


def keep_sources(module: Any, sources: Mapping[str, str]) -> None:
    """Gives a CUDA module the texts of its kernels, which it would read from files beside itself."""
    program = getattr(vars(module).get("CALL"), "program", None) if isinstance(module, ModuleType) else None
    if sources and program is not None:
        program.sources = sources


def _text(path: Path) -> str:
    content = read_private(path)
    if content is None:
        raise LookupError(path)
    return content.decode()


def _seal(folder: Path, manifest: Mapping[str, Any]) -> str:
    return _digest(json.dumps([folder.name, manifest], sort_keys=True))


def _format_manifest(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
