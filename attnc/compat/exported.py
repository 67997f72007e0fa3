"""The module of a form, among those that `attnc export` put beside this file; there it is compiled.py."""

from __future__ import annotations

import hashlib
import threading
from importlib import import_module
from types import ModuleType

from attnc.compat.form import Form
from attnc.runtime.locks import renew_in_forks

_IMPORTING = threading.RLock()
renew_in_forks(globals(), "_IMPORTING")


def making() -> threading.RLock:
    """Returns the lock that a thread holds while it imports a kernel."""
    return _IMPORTING


def builds_in(cap: tuple[float, float]) -> bool:
    """Returns False: kernels here are for any softcap."""
    return False


def load_form(form: Form) -> ModuleType:
    """Imports the module of a form, that of the first of its targets which has one here. ValueError where the
    folder was exported without it.
    """
    for target in form.targets:
        for fast in (True, False) if form.fast else (False,):
            if (module := _import_module(f"{module_name(form, target, fast=fast)}.default")) is not None:
                return module
    if (module := _import_module(module_name(form))) is not None:
        return module
    raise ValueError(
        f"these kernels were exported without one for this call; attnc makes it from\n{form.text}"
    )


def _import_module(name: str) -> ModuleType | None:
    whole = f"{__package__}.kernels.{name}"
    try:
        return import_module(whole)
    except ModuleNotFoundError as failure:
        if failure.name is None or not whole.startswith(failure.name):
            raise
        return None


def module_name(form: Form, target: str = "", *, fast: bool = False) -> str:
    """Names the file of a form for Triton, without its ending, or the folder for another target. fast: with
    gradients whose bits may differ from run to run.
    """
    ending = f"_{target.replace('.', '_')}" if target else ""
    splits = "" if form.splits is None else f"splits = {form.splits}"
    digest = hashlib.sha256(f"{form.text}{splits}".encode()).hexdigest()[:16]
    return f"flash_attention_{digest}{ending}{'_fast' * fast}"
