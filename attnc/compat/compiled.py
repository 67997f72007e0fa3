"""The module of a form, made by the compiler when it is first asked for."""

from __future__ import annotations

from types import ModuleType

from attnc.api.compile import making as making  # what `prepare_form` holds; exported folders have their own
from attnc.api.fastest import HOPPER, TRITON, warn_of_loss
from attnc.compat.form import Form

_FUNCTION = "attnc.compat"


#: Softcaps that get kernels of their own, before further ones are arguments of one kernel.
_SPECIAL = 4
_CAPS: set[tuple[float, float]] = set()


def builds_in(cap: tuple[float, float]) -> bool:
    """Returns whether kernels have this softcap built in: the first few of a process."""
    with making():
        if len(_CAPS) < _SPECIAL:
            _CAPS.add(cap)
        return cap in _CAPS


def load_form(form: Form) -> ModuleType:
    """Compiles a form for the first of its targets that has kernels for it: a module with `flash_attention`,
    whose `CALL` has its gradients. ValueError where no tile of such heads fits a GPU.
    """
    from attnc.api.compile import SpecError, compile_family, need_of, refuse_heads
    from attnc.diagnostics.attempts import first_made

    def make_module(target: str) -> ModuleType:
        family = compile_family(
            form.text,
            target=target,
            deterministic=not form.fast,
            warn=False,
            splits=form.splits,
            many=form.many,
        )
        module: ModuleType = family.module.default
        return module

    targets = form.targets or (TRITON,)
    try:
        module, failure = first_made(targets, make_module)
    except SpecError as refused:
        raise refuse_heads(_FUNCTION, (form.size, form.size_v), form.dtype, refused) from None
    if failure and targets[0] == HOPPER:
        warn_of_loss(_FUNCTION, need_of(failure))
    return module
