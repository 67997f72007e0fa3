"""Imported while torch.compile traces a call: has it show to modes all functions that mods call.

A `TorchFunctionMode` sees a function of torch in a graph if that is in torch's list of those that a tensor
may override. A few of torch.nn.functional, such as `tanh`, are not there, as outside of graphs what they call
is seen in their place. In a graph they are one operation each, whose result no recording would know.
"""

from __future__ import annotations

from contextlib import suppress
from types import FunctionType

from torch import overrides

from attnc.flex.symbols import OPERATIONS


def _list_hidden() -> set[FunctionType]:
    return {
        function
        for function in overrides.get_ignored_functions()
        if isinstance(function, FunctionType)
        and function.__module__ == "torch.nn.functional"
        and function.__name__ in OPERATIONS
    }


with suppress(ImportError, AttributeError):  # where torch has it elsewhere, such a mod is an error as before
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().update(_list_hidden())
