"""Has torch.compile show to modes all functions that mods call, while a mod is recorded and no longer.

A `TorchFunctionMode` sees a function of torch in a graph if that is in torch's list of those that a tensor
may override. A few of torch.nn.functional, such as `tanh`, are not there, as outside of graphs what they call
is seen in their place. In a graph they are one operation each, whose result no recording would know.

The list is of the whole process, and of subclasses of tensors too, which are meant to see what is called. So
what is added is taken away behind the mod, and at the end of a compilation that a mod has ended.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from types import FunctionType
from typing import Any

from torch import overrides

from attnc.flex.symbols import OPERATIONS


def show_hidden(is_shown: bool) -> None:
    """Adds the functions to torch's list, or takes them away again."""
    with suppress(ImportError, AttributeError):  # where torch has it elsewhere, such a mod is an error
        from torch._dynamo.variables.torch import get_overridable_functions

        listed: set[Any] = get_overridable_functions()
        if is_shown:
            _hide_at_the_end()
            listed |= _hidden()
        else:
            listed -= _hidden()


# What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls it for real.
show_hidden._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


@cache
def _hidden() -> frozenset[FunctionType]:
    """Those that torch does not list itself."""
    from torch._dynamo.variables.torch import get_overridable_functions

    return frozenset(
        function
        for function in overrides.get_ignored_functions() - get_overridable_functions()
        if isinstance(function, FunctionType)
        and function.__module__ == "torch.nn.functional"
        and function.__name__ in OPERATIONS
    )


def _hide_at_the_end() -> None:
    """Has them hidden when a compilation ends, from now on. `torch._dynamo.reset` forgets that."""
    from torch._dynamo.callback import callback_handler

    if _hide not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_hide)


def _hide(*_: object) -> None:
    show_hidden(False)
