"""A memory checker for the interpreter: which element of which tensor does each active lane touch?

Every tensor that is passed to a kernel becomes an `Allocation` for the length of the launch: exactly the
elements of its view, not its storage, so that a wrong stride which lands between two rows is found as well
as one that leaves the buffer.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Addresses: TypeAlias = npt.NDArray[np.uint64]
Bools: TypeAlias = npt.NDArray[np.bool_]
_Signed: TypeAlias = npt.NDArray[np.int64]
_NOBODY = 0
#: Of Linux; in Python's mmap module from 3.13 on.
_MAP_NORESERVE = 0x4000


class MemoryFault(Exception):
    """A kernel touched memory that is none of its arguments' elements, or raced for an element."""


@dataclass(slots=True)
class Allocation:
    """The elements of one tensor argument. is_whole: whether every aligned address of its span is one.
    `written[i]`: the number, from 1, of the program that stored element i of its span.
    """

    name: str
    base: int
    itemsize: int
    belongs: Bools
    writable: bool
    is_whole: bool = False
    written: npt.NDArray[np.int64] | None = None

    @property
    def end(self) -> int:
        return self.base + len(self.belongs) * self.itemsize

    def count(self, addresses: _Signed) -> _Signed:
        """Returns which elements of its span lie at these addresses."""
        return (addresses - self.base) >> (self.itemsize.bit_length() - 1)  # sizes are powers of two

    def holds(self, addresses: _Signed, first: int, last: int) -> Bools:
        """Returns which of the addresses, from first to last, are those of elements."""
        covers = self.base <= first and last < self.end
        inside: Bools = (addresses - self.base) & (self.itemsize - 1) == 0
        if not covers:
            inside &= (addresses >= self.base) & (addresses < self.end)
        index = self.count(addresses)
        if inside.all():
            return self.belongs[index]
        inside[inside] = self.belongs[index[inside]]
        return inside


@dataclass(slots=True)
class Watch:
    """The tensors of the launch at hand, and the program that runs. order: in which they do, see `place`."""

    enabled: bool = True
    readonly: frozenset[int] = frozenset()
    allocations: list[Allocation] = field(default_factory=list)
    program: int = 0
    order: int = 0

    def place(self, turn: int, count: int) -> int:
        """Returns which of `count` programs runs at this turn: all in a row, or in an order of this number's
        own.
        """
        return _permutation(self.order, count)[turn] if self.order else turn

    def register(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor argument: the addresses of its elements, as its sizes and strides say."""
        reach = [(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        belongs = _zeros(1 + sum(reach) if tensor.numel() else 0, np.bool_)
        if tensor.numel():
            strides = [stride * belongs.itemsize for stride in tensor.stride()]
            np.lib.stride_tricks.as_strided(belongs, tensor.shape, strides)[...] = True
        base, size = tensor.data_ptr(), tensor.element_size()
        is_whole = tensor.is_contiguous() and base % size == 0
        self.allocations.append(Allocation(name, base, size, belongs, base not in self.readonly, is_whole))

    def load(self, addresses: Addresses, mask: Bools, has_other: bool) -> None:
        """Checks a load: MemoryFault for a stray address, or for an inactive lane without `other`."""
        if not self.enabled:
            return
        # The interpreter loses the `other=0` of a scalar load on the way here.
        if not has_other and mask.size > 1 and not _is_full(mask):
            raise MemoryFault("a masked load without other= leaves inactive lanes undefined on a GPU")
        for allocation, active in self._locate(addresses, mask, "load"):
            if allocation.written is not None:
                writers = allocation.written[allocation.count(active)]
                if ((writers != _NOBODY) & (writers != 1 + self.program)).any():
                    raise MemoryFault(
                        f"load from '{allocation.name}' of an element that another program stores"
                    )

    def store(self, addresses: Addresses, mask: Bools) -> None:
        """Checks a store: MemoryFault for a stray address, an input, or a race between programs."""
        if not self.enabled:
            return
        for allocation, active in self._locate(addresses, mask, "store"):
            if not allocation.writable:
                raise MemoryFault(f"store to '{allocation.name}', which is an input")
            if allocation.written is None:
                allocation.written = _zeros(len(allocation.belongs), np.int64)
            index = allocation.count(active)
            writers = allocation.written[index]
            if ((writers != _NOBODY) & (writers != 1 + self.program)).any():
                raise MemoryFault(f"two programs store to the same element of '{allocation.name}'")
            allocation.written[index] = 1 + self.program

    def atomic(self, addresses: Addresses, mask: Bools) -> None:
        if self.enabled:
            for _ in self._locate(addresses, mask, "atomic"):
                pass

    def _locate(self, addresses: Addresses, mask: Bools, action: str) -> Iterator[tuple[Allocation, _Signed]]:
        """Yields the tensors in which active lanes lie, and the addresses of those."""
        lanes = addresses if addresses.shape == mask.shape else np.broadcast_to(addresses, mask.shape)
        active = (lanes.reshape(-1) if _is_full(mask) else lanes[mask]).view(np.int64)
        if not active.size:
            return
        first, last = int(np.minimum.reduce(active)), int(np.maximum.reduce(active))
        for allocation in self.allocations:
            if last < allocation.base or first >= allocation.end:
                continue
            covers = allocation.is_whole and allocation.base <= first and last < allocation.end
            if covers and not np.bitwise_or.reduce(active) & (allocation.itemsize - 1):
                yield allocation, active
                return
            inside = allocation.holds(active, first, last)
            if inside.all():
                yield allocation, active
                return
            if inside.any():
                yield allocation, active[inside]
                active = active[~inside]
        raise MemoryFault(self._describe(int(active[0]), active.size, action))

    def _describe(self, address: int, count: int, action: str) -> str:
        if not self.allocations:
            return f"{action} from or to {count} addresses, but the kernel has no tensor"
        nearest = min(
            self.allocations, key=lambda a: max(a.base - address, address - (a.end - a.itemsize), 0)
        )
        element = (address - nearest.base) / nearest.itemsize
        size = len(nearest.belongs)
        return (
            f"{action} of {count} elements outside every tensor, the first at element {element:g} of "
            f"'{nearest.name}', whose {np.count_nonzero(nearest.belongs)} elements span {size}"
        )


@lru_cache(maxsize=64)
def _permutation(order: int, count: int) -> list[int]:
    """Returns all numbers below `count`. Neighbours are torn apart: what they add up must not
    depend on it.
    """
    return random.Random(order).sample(range(count), count)


#: The one watch of this process: the interpreter runs one launch at a time.
WATCH = Watch()


def _is_full(mask: Bools) -> bool:
    return int(np.count_nonzero(mask)) == mask.size  # several times faster than `all`


def reserve_zeros(size: int) -> mmap.mmap:
    """Returns zeros whose pages are allocated when they are touched, so gigabytes fit any machine. Raises
    MemoryError for more than a process can address.
    """
    if size >= 1 << 47:
        raise MemoryError(f"{size} bytes")
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


def _zeros(count: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    if count < 1 << 24:
        return np.zeros(count, dtype=dtype)
    return np.frombuffer(reserve_zeros(count * np.dtype(dtype).itemsize), dtype=dtype)


@contextmanager
def shuffle_programs(order: int) -> Iterator[None]:
    """Makes the programs of an interpreted launch come in another order for every number; 0: in a row. Nobody
    may count on one.
    """
    before, WATCH.order = WATCH.order, order
    try:
        yield
    finally:
        WATCH.order = before


@contextmanager
def guarding(*inputs: torch.Tensor, enabled: bool = True) -> Iterator[None]:
    """Keeps kernels from storing to `inputs` within; `enabled=False` turns the checker off."""
    before = WATCH.readonly, WATCH.enabled
    WATCH.readonly = frozenset(tensor.data_ptr() for tensor in inputs)
    WATCH.enabled = enabled
    try:
        yield
    finally:
        WATCH.readonly, WATCH.enabled = before
