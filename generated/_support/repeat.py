# Copied by `attnc compile`, from attnc/support. Do not edit.
"""Calls that follow themselves: one question in C++ says whether all tensors look like those of the call
before, and what was prepared for it is launched without another look at them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch._C._dynamo import guards

from .arguments import refuse_shared
from .memory import Layout, make_picker, turned

#: What Dynamo's guards ask types, shapes, strides and devices of all tensors by, in C++.
_GUARDS: Any = getattr(guards, "TensorGuards", None)
Found = TypeVar("Found")
#: A call of inputs that look like those that it was made for, into `out` where there is one: the results.
Again: TypeAlias = Callable[..., Any]
#: Calls in a row, after which a guard is made.
_ROW = 4
#: After how many it is tried again: where gradients are wanted there is none, and asking costs little so.
_AGAIN = 64


class Repeated(Generic[Found]):
    """An inline cache of one entry: what was found for the last call, if all tensors look alike.

    A guard asks for what the key of a prepared call holds, and that no tensor requires a gradient, or with
    `gradients` that those do which did; it fails for anything else, subclasses and modes of torch included.
    Calls that take turns never have one. settle: what a guard finds, of what was found by its key and the
    tensors; None for nothing.
    """

    def __init__(
        self, settle: Callable[[Any, Sequence[Any]], Found | None] | None = None, *, gradients: bool = False
    ) -> None:
        self._settle, self._gradients = settle, gradients
        #: Whether tensors look like those of the last call, and what was found for these.
        self.guard: tuple[Callable[..., bool], Found] | None = None
        self._latest: Any = None
        self._row = 0

    def call(self, inputs: Sequence[Any]) -> Found | None:
        guard = self.guard
        if guard is not None:
            if guard[0](*inputs):
                return guard[1]
            self.guard = None
        return None

    def note(self, call: Any, inputs: Sequence[Any]) -> None:
        if call is not self._latest:
            self._latest, self._row = call, 0
        self._row += 1
        if self._row % _AGAIN == _ROW:
            found = call if self._settle is None else self._settle(call, inputs)
            check = None if found is None else _check_of(inputs, gradients=self._gradients)
            self.guard = None if check is None or found is None else (check, found)

    def forget(self) -> None:
        self.guard = self._latest = None


def _check_of(tensors: Sequence[Any], *, gradients: bool) -> Callable[..., bool] | None:
    """Returns whether other tensors look like these; None where that cannot be asked. gradients: whether they
    may require some. Those that are given twice have to be the same again, as guards take each once.
    """
    if _GUARDS is None:
        return None
    if not all(isinstance(x, torch.Tensor) and (gradients or not x.requires_grad) for x in tensors):
        return None
    first: dict[int, int] = {}
    again = [(at, first[id(x)]) for at, x in enumerate(tensors) if first.setdefault(id(x), at) != at]
    places = [*first.values()]
    given = [tensors[at] for at in places]
    sizes, strides = [list(x.shape) for x in given], [list(x.stride()) for x in given]
    check: Callable[..., bool] = _GUARDS(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if not again:
        return check
    pick = make_picker(places)
    if len(again) == 1:
        ((x, y),) = again
        return lambda *others: others[x] is others[y] and check(*pick(others))
    return lambda *others: all(others[x] is others[y] for x, y in again) and check(*pick(others))


class Launched(Protocol):
    """What is launched again (`call.Attention`). extras: optional tensors; written_names: of results."""

    input_names: tuple[str, ...]
    written_names: tuple[str, ...]
    extras: tuple[Any, ...]
    allocate: Callable[..., list[torch.Tensor]]


def make_again(
    call: Launched,
    prepared: tuple[Sequence[Layout], Sequence[Layout], Sequence[Any]],
    kept: Sequence[Layout],
    needed: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    laid: Sequence[Layout] | None = None,
) -> Again | None:
    """Returns a call that allocates and launches what was prepared; None where nothing is launched.

    kept: layouts of what is kept for gradients. needed: by a backward, among results and what is kept, which
    is returned beside the results. axes: the order that the first result has the kernel's axes in; laid: what
    results are allocated as, None for the kernel's own layouts.
    """
    results, scratch, launches = prepared
    if not launches:
        return None
    if laid is not None:
        results = laid
    if axes is not None:  # as kernels read addresses alone, it is allocated so
        results = (turned(results[0], axes), *results[1:])
    allocate, layouts = call.allocate, (*results, *kept, *scratch)
    count, end = len(results), len(results) + len(kept)
    is_single = count == 1
    behind: tuple[None, ...] = (None,) * (len(call.extras) - len(kept))
    names, written = call.input_names, call.written_names
    first, others = launches[0].run, tuple([launch.run for launch in launches[1:]])

    def again(inputs: Sequence[Any], out: Any = None) -> Any:
        if out is None:
            made = allocate(layouts, inputs[0])
            tensors = [*inputs, *made[:end], *behind, *made[end:], None]
        else:
            made = [out] if is_single else [*out]
            refuse_shared(names, inputs, written, made)
            tensors = [*inputs, *made, *behind, *(allocate(scratch, inputs[0]) if scratch else ()), None]
        first(tensors)
        for run in others:
            run(tensors)
        found = made[0] if is_single else tuple(made[:count])
        return found if needed is None else (found, tuple([made[at] for at in needed]))

    return again
