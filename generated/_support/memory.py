# Copied by `attnc compile`, from attnc/support. Do not edit.
"""Layouts of tensors: what prepared calls are found by, and what is allocated at every call. A call that
follows itself is found without its key.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch._C._dynamo import guards

try:
    # What Inductor's code calls: half the time of torch.empty.
    from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]  # in C
except ImportError:
    _empty_strided_cuda = None

Key: TypeAlias = tuple[object, ...]


class Memory(NamedTuple):
    """A tensor without its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides that matter: torch leaves that of an axis of size 1 as it came, of any alignment."""
        return tuple(0 if n == 1 else stride for n, stride in zip(self.shape, self.strides, strict=True))


#: A layout as `allocate` takes it: a plain tuple, which is taken apart faster than a named one.
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def memory_of(x: torch.Tensor) -> Memory:
    """Returns the layout of a tensor."""
    return Memory(tuple(x.shape), x.stride(), x.dtype)


def contiguous(shape: Sequence[int], dtype: torch.dtype) -> Memory:
    """Returns what torch.empty makes of a shape."""
    strides = tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
    return Memory(tuple(shape), strides, dtype)


def allocate(layouts: Sequence[Layout], like: torch.Tensor) -> list[torch.Tensor]:
    """Returns a tensor of each layout, on the device of another tensor."""
    if like.is_cuda and _empty_strided_cuda is not None and like.get_device() == torch._C._cuda_getDevice():
        return [_empty_strided_cuda(shape, strides, dtype) for shape, strides, dtype in layouts]
    device = like.device
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in layouts
    ]


def made_apart(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Returns a tensor on a GPU that is kept, made on a thread of its own: this one may be in the memory of a
    graph, where Inductor runs a call before it captures it, and replays write over what is kept there; or in
    inference mode, whose tensors no gradient is computed with.
    """

    def made() -> torch.Tensor:
        x = make()
        torch.cuda.current_stream(x.device).synchronize()  # other streams read it
        return x

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


def layout(x: torch.Tensor | None) -> Key | None:
    """Returns what preparing a call depends on of a tensor to write to, besides the alignment of its
    address.
    """
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.is_neg())


# The layouts of so many tensors that are given, one after the other. Written out: a loop takes a quarter
# longer, and this is a fifth of what a call costs on the host.

# fmt: off


def _layouts_of_2(tensors: Sequence[Any]) -> Key:
    q, k = tensors
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
    )


def layouts_of_3(tensors: Sequence[Any]) -> Key:
    """Returns the layouts of three tensors."""
    q, k, v = tensors
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
    )


def _layouts_of_4(tensors: Sequence[Any]) -> Key:
    q, k, v, a = tensors
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        a.shape, a.stride(), a.dtype, a.device,
    )


def _layouts_of_5(tensors: Sequence[Any]) -> Key:
    q, k, v, a, b = tensors
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        a.shape, a.stride(), a.dtype, a.device,
        b.shape, b.stride(), b.dtype, b.device,
    )


def _layouts_of_6(tensors: Sequence[Any]) -> Key:
    q, k, v, a, b, c = tensors
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        a.shape, a.stride(), a.dtype, a.device,
        b.shape, b.stride(), b.dtype, b.device,
        c.shape, c.stride(), c.dtype, c.device,
    )


# fmt: on


def _layouts(tensors: Sequence[Any]) -> Key:
    return tuple(part for x in tensors for part in (x.shape, x.stride(), x.dtype, x.device))


def layouts_of(count: int) -> Callable[[Sequence[Any]], Key]:
    """Returns a function from so many tensors to their layouts. AttributeError or TypeError for what is no
    tensor.
    """
    written_out = {2: _layouts_of_2, 3: layouts_of_3, 4: _layouts_of_4, 5: _layouts_of_5, 6: _layouts_of_6}
    return written_out.get(count, _layouts)


def make_picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Takes what is at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda given: tuple([given[at] for at in positions])


#: What Dynamo's guards ask types, shapes, strides and devices of all tensors by, in C++.
_GUARDS: Any = getattr(guards, "TensorGuards", None)
Found = TypeVar("Found")
#: Calls in a row, after which a guard is made.
_ROW = 4
#: After how many it is tried again: where gradients are wanted there is none, and asking costs little so.
_AGAIN = 64


class Repeated(Generic[Found]):
    """An inline cache of one entry: what was prepared for the last call, if all tensors look alike.

    A guard asks for what the key of a prepared call holds, and that no tensor requires a gradient, or with
    `gradients` that those do which did; it fails for anything else, subclasses and modes of torch included.
    Calls that take turns never have one.
    """

    def __init__(self, *, gradients: bool = False) -> None:
        self._gradients = gradients
        #: Whether tensors look like those of the last call, and what was prepared for these.
        self.guard: tuple[Callable[..., bool], Found] | None = None
        self._latest: Found | None = None
        self._row = 0

    def call(self, inputs: Sequence[Any]) -> Found | None:
        """Returns what was prepared for such tensors, or None."""
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
            check = _check_of(inputs, gradients=self._gradients)
            self.guard = None if check is None else (check, call)

    def forget(self) -> None:
        """Drops it."""
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
    return lambda *others: all(others[x] is others[y] for x, y in again) and check(*pick(others))
