"""The module of a form, made by the compiler when it is first asked for; and whose kernels forms run on."""

from __future__ import annotations

from types import ModuleType

import torch

from attnc.api.compile import making as making  # what `prepared` holds; exported folders have their own
from attnc.api.hopper import HOPPER, suits_hopper
from attnc.compat.form import Form

_CHOICES = ("triton", HOPPER)
_CHOSEN = ["triton"]


def run_on(target: str) -> None:
    """Chooses whose kernels calls run on from now on: "triton", or "cuda.sm_90a" for those that it takes as
    they are, which is prompts and training of 16-bit types on a Hopper GPU, outside of torch.compile.
    Raises ValueError for another.
    """
    if target not in _CHOICES:
        raise ValueError(f"target: expected one of {', '.join(_CHOICES)}, got {target!r}")
    _CHOSEN[0] = target


def target_for(*tensors: torch.Tensor) -> str:
    """Names the target whose kernels a call with these q, k and v runs on, where that is not Triton;
    otherwise "".
    """
    takes = _CHOSEN[0] == HOPPER and not torch.compiler.is_compiling() and suits_hopper(*tensors)
    return HOPPER if takes else ""


def compiled(form: Form) -> ModuleType:
    """Compiles a form: a module with `flash_attention`, whose `CALL` has its gradients; Triton's where the
    form's target has none.
    """
    from attnc.api.compile import SpecError, compile_family

    module: ModuleType
    if form.target:
        try:
            module = compile_family(form.text, target=form.target, warn=False).module.default
            return module
        except SpecError:
            pass
    module = compile_family(form.text, target="triton", warn=False).module.default
    return module
