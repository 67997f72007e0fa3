"""Generated text -> imported module. A copy of the text is kept in the cache, to be read where
a traceback points; nothing is run from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from attnc.build import digest
from attnc.plan import ir
from attnc.runtime.packages import import_text, keep_sources
from attnc.support.cache import cache_folder, discard_path, read_private, store_bytes
from attnc.support.folders import private_folder
from attnc.target.files import render_files
from attnc.tuned.choices import TunedChoice, tuned_choices


def load_module(module: ir.Module, choices: Iterable[TunedChoice] = ()) -> ModuleType:
    """Renders a planned module and imports it; its attribute with the attention's name is the callable."""
    source = module.variant.source
    tuned = tuned_choices(module, choices)
    name = Path(source.path).name
    return load_files(render_files(module, path=name, sha256=digest(source), tuned=tuned))


def load_text(text: str) -> ModuleType:
    """Imports the text of a generated module; equal texts give the same module object."""
    with suppress(OSError):  # a full disk, a read-only folder: it is imported without a copy
        store(text)
    return import_text(_place(text, ".py"), text.encode())


def store(text: str, suffix: str = ".py") -> Path:
    """Returns the path of a file of the cache with exactly this text, written in one step where it is not
    there yet. Raises OSError.
    """
    path = _place(text, suffix)
    _put(path, text)
    return path


def load_files(files: Mapping[str, str]) -> ModuleType:
    """Imports the Python module among files that belong side by side; equal files give the same module."""
    (module,) = (name for name in files if name.endswith(".py"))
    if len(files) == 1:
        return load_text(files[module])
    folder = cache_folder() / hashlib.sha256("\0".join(chain(*files.items())).encode()).hexdigest()
    with suppress(OSError):
        try:
            private_folder(folder)
        except PermissionError:  # something else has its name
            discard_path(folder)
            private_folder(folder)
        for name, text in files.items():
            _put(folder / name, text)
    loaded = import_text(folder / module, files[module].encode())
    keep_sources(loaded, {name: text for name, text in files.items() if name != module})
    return loaded


def load_file(path: Path) -> ModuleType:
    """Imports a file, once per process, under a name of its own and without touching sys.path. Nothing beside
    or above it is imported. Raises what the file raises.
    """
    path = path.resolve()
    return import_text(path, path.read_bytes())


def program_of(module: ModuleType) -> Any:
    """Returns the kernels of a generated CUDA module and their sources (`attnc.support.binaries.Program`)."""
    return module.CALL.program


def _place(text: str, suffix: str) -> Path:
    return cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()}{suffix}"


def _put(path: Path, text: str) -> None:
    if read_private(path) != text.encode():
        store_bytes(path, text.encode())
