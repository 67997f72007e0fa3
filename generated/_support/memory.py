# Copied by `attnc compile`, from attnc/support. Do not edit.
"""Layouts of tensors: what prepared calls are found by, and what is allocated at every call."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import gcd, prod
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch

try:
    # What Inductor's code calls: half the time of torch.empty.
    from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]  # in C
except ImportError:
    _empty_strided_cuda = None

Key: TypeAlias = tuple[object, ...]
_storage_of = attrgetter("layout")


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
    strides = tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
    return Memory(tuple(shape), strides, dtype)


def laid_like(like: Memory, dtype: torch.dtype, has_rows: bool) -> Memory:
    """Returns what torch.empty_like makes of such a tensor, whose elements are of this type: the axes in the
    order that they have in memory, without gaps. has_rows: the last axis has to be contiguous.
    """
    return _laid_like(*like[:2], dtype, has_rows)


# torch lays out a tensor without memory in Python, which takes longer than a call
@lru_cache(maxsize=4096)
def _laid_like(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, has_rows: bool
) -> Memory:
    found = memory_of(torch.empty_like(torch.empty_strided(shape, strides, dtype=dtype, device="meta")))
    return contiguous(shape, dtype) if has_rows and found.steps[-1] > 1 else found


def lay_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a gradient with the strides that torch.empty_like gives one of its input: itself, or a copy."""
    if like.is_contiguous() and x.is_contiguous():
        return x
    wanted = _lay_like(*memory_of(x), like.stride())
    return x if wanted is None else torch.empty_strided(*wanted, dtype=x.dtype, device=x.device).copy_(x)


@lru_cache(maxsize=4096)
def _lay_like(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, like: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the shape and strides of a copy; None where it would lie as the gradient does."""
    wanted = _laid_like(shape, like, dtype, has_rows=False)
    return None if Memory(shape, strides, dtype).steps == wanted.steps else wanted[:2]


def plain(memories: Iterable[Memory]) -> tuple[Layout, ...]:
    """Returns layouts as `allocate` takes them."""
    return tuple((memory.shape, memory.strides, memory.dtype) for memory in memories)


def turned(layout: Layout, axes: Sequence[int]) -> Layout:
    """Returns the layout of a tensor with its axes in this order."""
    shape, strides, dtype = layout
    return tuple(shape[at] for at in axes), tuple(strides[at] for at in axes), dtype


def allocate(layouts: Sequence[Layout], like: torch.Tensor) -> list[torch.Tensor]:
    """Returns a tensor of each layout, on the device of another tensor."""
    if like.is_cuda and _empty_strided_cuda is not None and like.get_device() == torch._C._cuda_getDevice():
        return [_empty_strided_cuda(shape, strides, dtype) for shape, strides, dtype in layouts]
    device = like.device
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in layouts
    ]


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether some byte belongs to an element of each of two tensors."""
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    return _meet(_steps_of(a), _steps_of(b), b.data_ptr() - a.data_ptr())


#: Multiples of steps that are tried at most to say whether two tensors share an element.
_MOST_TRIED = 1 << 12
#: How far apart elements are along an axis, in bytes, and the number of the last.
_Steps: TypeAlias = tuple[tuple[int, int], ...]


def _steps_of(x: torch.Tensor) -> _Steps:
    """Returns the steps of all axes, behind the step from byte to byte of an element."""
    size = x.element_size()
    axes = [(stride * size, length - 1) for length, stride in zip(x.shape, x.stride(), strict=True)]
    return ((1, size - 1), *axes)


@lru_cache(maxsize=256)
def _meet(a: _Steps, b: _Steps, distance: int) -> bool:
    """Returns whether a sum of steps of `a` is one of `b`, which begins at a distance: a bounded linear
    Diophantine equation for each pair of bytes, the longest step first. True too where so many multiples of
    steps may have to be tried that nobody can have meant it: what is written to may not be in doubt.
    """
    ((_, last_a), *axes_a), ((_, last_b), *axes_b) = a, b
    ends: dict[int, tuple[int, int]] = {}
    for steps, sign in ((axes_a, 1), (axes_b, -1)):
        for step, last in steps:
            least, most = ends.get(step, (0, 0))
            ends[step] = (least, most + last) if sign > 0 else (least - last, most)
    terms = sorted(((step, *span) for step, span in ends.items() if step), reverse=True)
    # of what the terms from each one on make: what divides it, the least and the most
    made = [(0, 0, 0)]
    for step, least, most in reversed(terms):
        shared, low, high = made[0]
        made.insert(0, (gcd(shared, step), low + step * least, high + step * most))
    left = _MOST_TRIED

    def solves(at: int, rest: int) -> bool:
        """Returns whether the terms from this one on make what is left."""
        nonlocal left
        shared, low, high = made[at]
        if not low <= rest <= high or rest % (shared or 1):
            return False
        if at == len(terms):
            return True
        (step, least, most), (behind, low, high) = terms[at], made[at + 1]
        first, end = max(least, -((high - rest) // step)), min(most, (rest - low) // step)
        every = behind // shared or 1  # only so many times that the shorter steps can make the rest
        first += (rest // shared * pow(step // shared, -1, every) - first) % every
        for times in range(first, end + 1, every):
            left -= 1
            if left < 0 or solves(at + 1, rest - step * times):
                return True
        return False

    return any(solves(0, distance - byte) for byte in range(-last_b, last_a + 1))


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
    return None if x is None else (type(x), x.layout, x.shape, x.stride(), x.dtype, x.device, x.is_neg())


def kinds(tensors: Sequence[torch.Tensor]) -> Key:
    """Returns what preparing a call depends on of tensors besides their layouts: whether they have memory."""
    return *map(type, tensors), *map(_storage_of, tensors)


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
