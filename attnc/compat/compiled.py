"""The module of a form, made by the compiler when it is first asked for."""

from __future__ import annotations

from types import ModuleType

from attnc.compat.form import Form


def compiled(form: Form) -> ModuleType:
    """Its module, with `flash_attention`, whose `CALL` has its gradients."""
    from attnc.api.compile import compile_family

    module: ModuleType = compile_family(form.text, target="triton", warn=False).module.default
    return module
