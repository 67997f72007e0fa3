# Copied by `attnc compile`, from attnc/support. Do not edit.
"""Keys and values in pages as kernels for gradients take them: as rows that follow each other, and back.

A GPU copies all pages in one launch, and sums gradients of rows in another (`page_kernels`). Where there is
no Triton, and on a CPU, torch does the same.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from .memory import Layout, Memory, allocate, contiguous, laid_like, memory_of, plain
from .place import Place
from .sizes import evaluate

Rows: TypeAlias = Sequence[torch.Tensor]
#: Writes page numbers and rows, of what is made and what is given.
Fill: TypeAlias = Callable[[Rows, Sequence[Any]], None]
#: Sums rows, f32, by page: of rows, page numbers, keys of each sequence, and gradients that are written.
Sum: TypeAlias = Callable[[Rows, torch.Tensor, torch.Tensor, Rows], None]
#: An input in pages by name, what it looks like, and the type of its gradient.
Wanted: TypeAlias = tuple[str, Memory, torch.dtype]
#: What the page of each entry of a table is called beside kernels, and how many keys each sequence has.
PAGE_NUMBERS, KEY_COUNTS = "_pages", "_keys"
#: A length that is an element of an input for each sequence.
_OF_SEQUENCE = re.compile(r"at\((\w+), b\)")


class PageAxes(NamedTuple):
    """How pages lie in memory: their number, heads, columns; strides of pages, keys, heads and columns."""

    number: int
    heads: int
    width: int
    strides: tuple[int, int, int, int]


class PageKernels(Protocol):
    """What copies and sums pages in memory of a GPU. pages: of one or two tensors, in the order of the axes
    of `PageAxes`; page: keys of one.
    """

    def gather(
        self, pages: Sequence[PageAxes], table: Memory, keys: Memory, page: int, device: torch.device
    ) -> Callable[[Rows], None]:
        """Returns what does as `find_pages` and `gather_rows`, of two tensors or twice the same: (pages,
        pages, table, keys of each sequence, rows, rows, numbers, counted keys). Rows of entries behind the
        end of a sequence are left alone.
        """

    def reads(self, pages: torch.Tensor) -> bool:
        """Returns whether it can make 16 bits of such elements, if they have 8."""

    def sum(self, pages: Sequence[PageAxes], table: tuple[int, int], page: int, device: torch.device) -> Sum:
        """Returns what sums rows as `sum_rows` does. table: its shape."""


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

    def fill(self, place: Place, kernels: PageKernels | None = None) -> Fill:
        """Returns what makes page numbers and rows, from what is made and what is given. place: of the
        launches.
        """
        written = place.results
        given = place.order[: len(place.order) - len(written)]
        sizes = {name: value for name, value in place.names.items() if isinstance(value, int)}
        at_numbers, at_counts = written.index(PAGE_NUMBERS), written.index(KEY_COUNTS)
        table = given.index(self.table)
        pairs = [(given.index(self.own(name)), written.index(name), axes) for name, axes in self.axes.items()]
        gathers: list[Callable[[Rows], None]] = []

        def fill(made: Rows, tensors: Sequence[Any]) -> None:
            numbers, counts = made[at_numbers], made[at_counts]
            if not numbers.numel():
                return
            keys = count_keys(self.length, dict(zip(given, tensors, strict=True)), sizes)
            sources = [tensors[source] for source, _, _ in pairs]
            if kernels is None or not all(map(kernels.reads, sources)):
                count = sources[0].shape[_pages_first(pairs[0][2])[0]]
                counts.copy_(keys.long().clamp(0, numbers.shape[1] * self.page))
                find_pages(tensors[table], counts, self.page, count, numbers)
                for source, (_, at, axes) in zip(sources, pairs, strict=True):
                    gather_rows(source, numbers, made[at], axes)
                return
            if not gathers:  # of later calls alike, too
                lie = [find_axes(memory_of(x), axes) for x, (_, _, axes) in zip(sources, pairs, strict=True)]
                of_table, of_keys = memory_of(tensors[table]), memory_of(keys)
                gathers.append(kernels.gather(lie, of_table, of_keys, self.page, keys.device))
            rows = [made[at] for _, at, _ in pairs]
            gathers[0]([sources[0], sources[-1], tensors[table], keys, rows[0], rows[-1], numbers, counts])

        return fill

    def finish(
        self,
        place: Place,
        others: Mapping[str, Callable[[Rows], torch.Tensor]],
        wanted: Sequence[Wanted],
        kernels: PageKernels | None = None,
    ) -> Callable[..., tuple[torch.Tensor | None, ...]]:
        """Returns what makes the gradients that are asked for, from all that is made; None for the others.
        others: what makes those that are not of pages.
        """
        at = {name: i for i, name in enumerate(place.results)}
        batch, columns = place.memories[PAGE_NUMBERS].shape
        every = (True,) * len(wanted)

        @functools.cache
        def prepare(summed: tuple[Wanted, ...]) -> tuple[tuple[Layout, ...], Sum]:
            laid = [laid_like(like, dtype, has_rows=False) for _, like, dtype in summed]
            axes = [self.axes[name] for name, _, _ in summed]
            lie = list(map(find_axes, laid, axes))
            if kernels is not None and batch * columns and lie[0].number:
                return plain(laid), kernels.sum(lie, (batch, columns), self.page, place.device)

            def add(rows: Rows, numbers: torch.Tensor, keys: torch.Tensor, made: Rows) -> None:
                for given, into, own in zip(rows, made, axes, strict=True):
                    sum_rows(given, numbers, keys, into, own)

            return plain(laid), add

        def finish(made: Rows, asked: Sequence[bool] = every) -> tuple[torch.Tensor | None, ...]:
            numbers, keys = made[at[PAGE_NUMBERS]], made[at[KEY_COUNTS]]
            summed = tuple(
                [one for one, wants in zip(wanted, asked, strict=True) if wants and one[0] not in others]
            )
            sums: dict[str, torch.Tensor] = {}
            if summed:
                layouts, add = prepare(summed)
                sums = dict(zip([name for name, _, _ in summed], allocate(layouts, numbers), strict=True))
                add([made[at[f"d{name}"]] for name in sums], numbers, keys, list(sums.values()))
            found = [
                sums.get(name) if not wants or name in sums else others[name](made)
                for (name, _, _), wants in zip(wanted, asked, strict=True)
            ]
            return tuple(found)

        return finish


def find_axes(memory: Memory, axes: str) -> PageAxes:
    """Returns how pages with these axes lie in memory."""
    order = _pages_first(axes)
    number, _, *heads, width = (memory.shape[axis] for axis in order)
    p, n, *h, d = (memory.steps[axis] for axis in order)
    return PageAxes(number, math.prod(heads), width, (p, n, h[0] if h else 0, d))


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
    """Returns how many keys each sequence has, an integer [B], from the text of a `length`. They may be more
    than its entries hold, or negative: none then.
    """
    if (found := _OF_SEQUENCE.fullmatch(text)) is not None:
        x: torch.Tensor = tensors[found[1]]
        if x.shape == (sizes["B"],) and not x.is_floating_point():
            return x
    device = next(x.device for x in tensors.values() if isinstance(x, torch.Tensor))
    lengths, b = _LengthTerms(device), torch.arange(sizes["B"], device=device)
    keys = lengths.tensor(evaluate(text, {**sizes, **lengths.named, **tensors, "b": b}))
    return keys.long().expand(sizes["B"])


def find_pages(
    table: torch.Tensor, keys: torch.Tensor, page: int, count: int, into: torch.Tensor
) -> torch.Tensor:
    """Writes the page of each entry of a table [B, P], of `count` pages. It is `count` for one behind the end
    of its sequence, and for one that names no page, for which there is no right gradient: no other memory is
    read or written.
    """
    begins = torch.arange(into.shape[1], device=into.device) * page
    named = (begins < keys[:, None]) & (table >= 0) & (table < count)
    return into.copy_(torch.where(named, table.to(into.dtype), count))


def gather_rows(pages: torch.Tensor, numbers: torch.Tensor, into: torch.Tensor, axes: str) -> None:
    """Copies pages to where their rows are among those of all sequences, in the type of these; those of no
    page are 0. axes: of both.
    """
    order = _pages_first(axes)
    source = pages.permute(order)
    rows = into.permute(order).view(numbers.numel(), *source.shape[1:])
    flat = numbers.view(-1).long()
    if source.shape[0]:
        # torch has more functions of bytes than of other types of 8 bits
        of_bytes = source.view(torch.uint8) if source.dtype.itemsize == 1 else source
        found = torch.index_select(of_bytes, 0, flat.clamp(max=len(source) - 1))
        rows.copy_(found.view(source.dtype))
    rows.masked_fill_((flat == len(source)).view(-1, *[1] * (rows.dim() - 1)), 0)


def sum_rows(
    rows: torch.Tensor, numbers: torch.Tensor, keys: torch.Tensor, into: torch.Tensor, axes: str
) -> None:
    """Writes the gradient of pages from those of rows, f32: a page that several entries name has the sum, in
    their order. Of each sequence the rows of its keys count. axes: of both.
    """
    order = _pages_first(axes)
    pages, flat = into.permute(order), numbers.view(-1).long()
    sums = torch.zeros(pages.shape, dtype=torch.float32, device=rows.device)
    if sums.numel() and rows.numel():
        begins = torch.arange(rows.permute(order).shape[1], device=rows.device)
        named = flat < len(pages)
        kept = (begins < keys[:, None]).view(flat.numel(), -1) & named[:, None]
        given = rows.permute(order).reshape(*kept.shape, *pages.shape[2:])
        given = torch.where(kept.view(*kept.shape, *[1] * (given.dim() - 2)), given, 0)
        # what belongs to no page adds zeros to all pages in turn, of which none gets many
        places = torch.where(named, flat, torch.arange(flat.numel(), device=rows.device) % len(pages))
        if sums.is_cuda:  # sorts entries; index_add_ takes them as they come
            sums.index_put_((places,), given, accumulate=True)
        else:
            sums.index_add_(0, places, given)
    pages.copy_(sums)


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
        inside, place = self.tensor(True), self.tensor(0)
        for size, given in zip(x.shape, indices, strict=True):
            index = self.tensor(given)
            inside = inside & (index >= 0) & (index < size)
            place = place * size + index.clamp(0, size - 1)
        # an index without axes in brackets would be copied to the host
        return torch.where(inside, torch.take(x, place), x.new_zeros(()))

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
