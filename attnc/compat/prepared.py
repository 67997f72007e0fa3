"""The functions of forms, found once for all calls of a form."""

from __future__ import annotations

from types import ModuleType

from attnc.compat.compiled import compiled, making
from attnc.compat.form import Facts, Form

#: Functions of this process, by names that `prepared` gives: attributes, which torch.compile follows.
FUNCTIONS = ModuleType("attnc.compat.functions")
_PREPARED: dict[Facts, tuple[str, ...]] = {}


def prepared(facts: Facts) -> tuple[str, ...]:
    """(name in FUNCTIONS, names of the arguments) of a form, whose fields come sorted.

    `NAME_gradients` there is the backward of a form with gradients: (do, dlse, inputs, o, lse, configs).
    It is compiled, kept on disk, and found again in this process.
    """
    found = _PREPARED.get(facts)
    if found is None:
        with making():
            found = _PREPARED.get(facts) or _made(facts)
    return found


def _made(facts: Facts) -> tuple[str, ...]:
    form = Form(**dict(facts))
    name = f"form_{len(vars(FUNCTIONS))}"
    module = compiled(form)
    setattr(FUNCTIONS, name, module.flash_attention)
    if form.grads:
        setattr(FUNCTIONS, f"{name}_gradients", module.CALL.gradients)
    found = _PREPARED[facts] = name, *(name for name, _ in form.inputs)
    return found


# What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls it for real.
prepared._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes
