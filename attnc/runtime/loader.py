"""Generated text -> imported module. Triton reads a kernel's source from its file, so the text gets one
first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from attnc.build import digest
from attnc.plan import ir
from attnc.runtime.packages import import_once, package_of
from attnc.support.cache import cache_folder, store_bytes
from attnc.target.files import render_files
from attnc.tuned.choices import Choice, tuned_choices


def load_module(module: ir.Module, choices: Iterable[Choice] = ()) -> ModuleType:
    """Renders a planned module and imports it; its attribute with the attention's name is the callable."""
    source = module.variant.source
    tuned = tuned_choices(module, choices)
    name = Path(source.path).name
    return load_files(render_files(module, path=name, sha256=digest(source), tuned=tuned))


def load_text(text: str) -> ModuleType:
    """Imports the text of a generated module; equal texts give the same module object."""
    return load_file(store(text))


def store(text: str, suffix: str = ".py") -> Path:
    """Returns the path of a file with exactly this text, written in one step where it is not there yet."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = cache_folder() / f"{digest}{suffix}"
    try:
        if path.read_text(encoding="utf-8") == text:
            return path
    except (FileNotFoundError, UnicodeDecodeError):
        pass
    store_bytes(path, text.encode())
    return path


def load_files(files: Mapping[str, str]) -> ModuleType:
    """Imports the Python module among files that belong side by side; equal files give the same module."""
    (module,) = (name for name in files if name.endswith(".py"))
    if len(files) == 1:
        return load_text(files[module])
    folder = cache_folder() / hashlib.sha256("\0".join(chain(*files.items())).encode()).hexdigest()
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, text in files.items():
        if not (folder / name).is_file():
            store_bytes(folder / name, text.encode())
    return load_file(folder / module)


def load_file(path: Path) -> ModuleType:
    """Imports a file under a name of its own, without touching sys.path. Raises what the file raises."""
    return import_once(f"{package_of(path.parent)}.{path.stem}", path)


def program_of(module: ModuleType) -> Any:
    """Returns the kernels of a generated CUDA module and their sources (`attnc.support.binaries.Program`)."""
    return module.CALL.program
