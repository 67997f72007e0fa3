"""The module of a form, among those that `attnc export` put beside this file; there it is compiled.py."""

from __future__ import annotations

import hashlib
import threading
from importlib import import_module
from types import ModuleType

from attnc.compat.form import Form

_IMPORTING = threading.RLock()


def making() -> threading.RLock:
    """Returns what a thread holds while it imports a kernel."""
    return _IMPORTING


def compiled(form: Form) -> ModuleType:
    """Imports the module of a form. ValueError where the folder was exported without it."""
    name = module_name(form)
    try:
        return import_module(f"{__package__}.kernels.{name}")
    except ModuleNotFoundError as failure:
        if failure.name is None or not failure.name.endswith(name):
            raise
        raise ValueError(
            f"these kernels were exported without one for this call; attnc makes it from\n{form.text}"
        ) from None


def target_for(*tensors: object) -> str:
    """Names the target of a call where it is not that of the exported kernels: never."""
    return ""


def module_name(form: Form) -> str:
    """Names the file of a form, without its ending."""
    return f"flash_attention_{hashlib.sha256(form.text.encode()).hexdigest()[:16]}"
