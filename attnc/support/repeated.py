"""What was prepared for a call, found again without a key where the same call follows itself."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch._C._dynamo import guards

#: What Dynamo's guards ask types, shapes, strides and devices of all tensors by, in C++.
_GUARDS: Any = getattr(guards, "TensorGuards", None)
Found = TypeVar("Found")
#: Calls in a row, after which a guard is made.
_ROW = 4
#: After how many it is tried again: where gradients are wanted there is none, and asking costs little so.
_AGAIN = 64


class Repeated(Generic[Found]):
    """An inline cache of one entry: what was prepared for the last call, if all tensors look alike.

    A guard asks for what the key of a prepared call holds, and that no tensor requires a gradient; it fails
    for anything else, subclasses and modes of torch included. Calls that take turns never have one.
    """

    def __init__(self) -> None:
        #: Whether tensors look like those of the last call, and what was prepared for these.
        self.guard: tuple[Callable[..., bool], Found] | None = None
        self._latest: Found | None = None
        self._row = 0

    def call(self, inputs: Sequence[Any]) -> Found | None:
        """What was prepared for such tensors, or None."""
        guard = self.guard
        if guard is not None:
            if guard[0](*inputs):
                return guard[1]
            self.guard = None
        return None

    def note(self, call: Found, inputs: Sequence[Any]) -> None:
        """Remembers what was found for these by its key."""
        if call is not self._latest:
            self._latest, self._row = call, 0
        self._row += 1
        if self._row % _AGAIN == _ROW:
            check = _check_of(inputs)
            self.guard = None if check is None else (check, call)

    def forget(self) -> None:
        """Drops it."""
        self.guard = self._latest = None


def _check_of(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """Whether other tensors look like these; None where that cannot be asked."""
    if _GUARDS is None or len({id(x) for x in tensors}) < len(tensors):  # each has to be another one
        return None
    if not all(isinstance(x, torch.Tensor) and not x.requires_grad for x in tensors):
        return None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    check: Callable[..., bool] = _GUARDS(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return check
