"""Keys and values in pages as kernels for gradients take them: as rows that follow each other, and back."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .memory import Memory, contiguous, laid_like
from .sizes import Names, evaluate

#: Writes page numbers and rows, of what is made and what is given.
Fill: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[Any]], None]
#: What kernels of gradients call the number of the page of each entry of a table.
PAGE_NUMBERS = "_pages"


@dataclass(frozen=True)
class Pages:
    """Inputs whose rows lie in pages. table: the input [B, P] with the page of every `page` keys; length: how
    many keys sequence `b` has, as text; axes: of each input, and of its rows in their place: b, n and h.

    Where two entries name the same page, it gets the sum of what each of them gets, in the order of the
    entries; what no key lies in gets 0.
    """

    table: str
    page: int
    length: str
    axes: Mapping[str, str]

    def own(self, name: str) -> str:
        """Returns what an input is called where kernels see its rows by its name."""
        return f"{name} in pages" if name in self.axes else name

    def fill(self, given: Sequence[str], written: Sequence[str], names: Names) -> Fill:
        """Returns what makes page numbers and rows, from what is made and what is given."""
        sizes = {name: value for name, value in names.items() if isinstance(value, int)}
        at_numbers, table = written.index(PAGE_NUMBERS), given.index(self.table)
        pairs = [(given.index(self.own(name)), written.index(name), name) for name in self.axes]

        def fill(made: Sequence[torch.Tensor], tensors: Sequence[Any]) -> None:
            numbers = made[at_numbers]
            count = tensors[pairs[0][0]].shape[_pages_first(self.axes[pairs[0][2]])[0]]
            keys = count_keys(self.length, dict(zip(given, tensors, strict=True)), sizes)
            find_pages(tensors[table], keys, self.page, count, numbers)
            for source, at, name in pairs:
                gather_rows(tensors[source], numbers, made[at], self.axes[name])

        return fill


def lay_rows(shape: Sequence[int], axes: str, dtype: torch.dtype) -> Memory:
    """Returns the layout of rows that are gathered from pages: all of one key behind each other, so that a
    page of each axis order is one run.
    """
    order = _pages_first(axes)
    memory = contiguous([shape[axis] for axis in order], dtype)
    strides = [0] * len(order)
    for axis, stride in zip(order, memory.strides, strict=True):
        strides[axis] = stride
    return Memory(tuple(shape), tuple(strides), dtype)


def count_keys(text: str, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> torch.Tensor:
    """Returns how many keys each sequence has, i64[B], from the text of a `length`."""
    device = next(x.device for x in tensors.values() if isinstance(x, torch.Tensor))
    lengths, b = _LengthTerms(device), torch.arange(sizes["B"], device=device)
    keys = lengths.tensor(evaluate(text, {**sizes, **lengths.named, **tensors, "b": b}))
    return keys.long().clamp(0, sizes["N"]).expand(sizes["B"])


def find_pages(
    table: torch.Tensor, keys: torch.Tensor, page: int, count: int, into: torch.Tensor
) -> torch.Tensor:
    """Writes the page of each entry of a table [B, P], i64. Entries behind the end of a sequence become all
    `count` pages in turn: their rows have no keys, and so gradients of 0, and no page gets many of them. So
    do entries that name no page, for which there is no right gradient: no other memory is read or written.
    """
    places = torch.arange(into.numel(), device=into.device).view(into.shape)
    begins = torch.arange(into.shape[1], device=into.device) * page
    named = (begins < keys[:, None]) & (table >= 0) & (table < count)
    return torch.where(named, table, places % max(count, 1), out=into)


def gather_rows(pages: torch.Tensor, numbers: torch.Tensor, into: torch.Tensor, axes: str) -> None:
    """Copies pages to where their rows are among those of all sequences. axes: of both."""
    order = _pages_first(axes)
    source = pages.permute(order)
    if source.shape[0]:
        rows = into.permute(order).view(numbers.numel(), *source.shape[1:])
        torch.index_select(source, 0, numbers.view(-1), out=rows)


def sum_pages(
    rows: torch.Tensor, numbers: torch.Tensor, like: Memory, axes: str, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the gradient of pages from those of rows, f32: a page that several entries name has the sum, in
    their order. like: the pages; axes: of both.
    """
    order = _pages_first(axes)
    count, *inner = (like.shape[axis] for axis in order)
    sums = torch.zeros((count, *inner), dtype=torch.float32, device=rows.device)
    if sums.numel() and rows.numel():
        given = rows.permute(order).reshape(numbers.numel(), *inner)
        if sums.is_cuda:  # sorts entries; index_add_ takes them as they come
            sums.index_put_((numbers.view(-1),), given, accumulate=True)
        else:
            sums.index_add_(0, numbers.view(-1), given)
    shape, strides, _ = laid_like(like, dtype, has_rows=False)
    made = torch.empty_strided(shape, strides, dtype=dtype, device=rows.device)
    made.permute(order).copy_(sums)
    return made


def _pages_first(axes: str) -> list[int]:
    """Returns the axes with those of pages, or sequences, and of keys first."""
    names = axes.replace("p", "b")
    rest = [at for at in range(len(axes) + 1) if names[at : at + 1] not in ("b", "n")]
    return [names.index("b"), names.index("n"), *rest]


class _LengthTerms:
    """What the text of a length may call, besides the functions of sizes. Numbers become tensors of the
    device, without a copy from the host, which no CUDA graph has.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.named = {
            "inf": math.inf,
            "at()": self._load,
            "least()": lambda x, y: torch.minimum(self.tensor(x), self.tensor(y)),
            "most()": lambda x, y: torch.maximum(self.tensor(x), self.tensor(y)),
            "quotient()": lambda x, y: self._divide(x, y)[0],
            "remainder()": lambda x, y: self._divide(x, y)[1],
            "ratio()": lambda x, y: self._float(x) / self._float(y),
            "where()": lambda x, then, other: torch.where(
                self.tensor(x) != 0, self.tensor(then), self.tensor(other)
            ),
            "absolute()": lambda x: self.tensor(x).abs(),
            "bit()": lambda word, place: self._look_at_bit(self.tensor(word), self.tensor(place)),
            "real()": lambda function, x: getattr(torch, function)(self._float(x)),
        }

    def tensor(self, x: Any) -> torch.Tensor:
        return x if isinstance(x, torch.Tensor) else torch.full((), x, device=self._device)

    def _float(self, x: Any) -> torch.Tensor:
        return self.tensor(x).float()

    def _load(self, x: torch.Tensor, *indices: Any) -> torch.Tensor:
        """Returns an element of an input for each sequence, in float32 or 64 bits, as kernels do; 0 where
        there is none.
        """
        x = x.float() if x.is_floating_point() else x.long()
        if not x.numel():
            return x.new_zeros(())
        inside, places = self.tensor(True), []
        for size, given in zip(x.shape, indices, strict=True):
            index = self.tensor(given)
            inside = inside & (index >= 0) & (index < size)
            places.append(index.clamp(0, size - 1))
        return torch.where(inside, x[tuple(places)], x.new_zeros(()))

    def _divide(self, left: Any, right: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the floored quotient and the remainder; 0 of a division by 0."""
        x, y = self.tensor(left), self.tensor(right)
        safe = torch.where(y == 0, torch.ones_like(y), y)
        quotient = torch.div(x, safe, rounding_mode="floor")
        rest = x - quotient * safe
        return torch.where(y == 0, 0, quotient), torch.where(y == 0, 0, rest)

    @staticmethod
    def _look_at_bit(word: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        inside = (place >= 0) & (place < 64)
        return inside & ((word >> place.clamp(0, 63)) & 1 != 0)
