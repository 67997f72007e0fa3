"""Generated text -> imported module. Triton reads a kernel's source from its file, so the text gets one
first.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from attnc.build import digest
from attnc.plan import ir
from attnc.plan.tuned import Choice, tuned_choices
from attnc.runtime.cache import store
from attnc.target.render import render


def load_module(module: ir.Module, choices: Iterable[Choice] = ()) -> ModuleType:
    """Renders a planned module and imports it; its attribute with the attention's name is the callable."""
    source = module.variant.source
    tuned = tuned_choices(module, choices)
    return load_text(render(module, path=Path(source.path).name, sha256=digest(source), tuned=tuned))


def load_text(text: str) -> ModuleType:
    """Imports the text of a generated module; equal texts give the same module object."""
    return load_file(store(text))


def load_file(path: Path) -> ModuleType:
    """Imports a file under a name of its own, without touching sys.path. Raises what the file raises."""
    name = f"attnc_generated_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
