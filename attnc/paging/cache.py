"""The pools and the tables on the device, kept as the allocator on the host decides, and what
a step gives to kernels.

Every call happens whole or not at all, also where the device runs out of memory or a transfer fails: all that
a call needs is made and sent first, pages are copied into free ones, then one operation writes what has
changed of the tables, and then the lists on the host follow, which cannot fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

import torch

from attnc.diagnostics.shown import show_value
from attnc.paging.allocator import Change, Holding, PageAllocator, Statistics
from attnc.paging.arguments import check_size, check_tensor, to_integer, to_integers
from attnc.paging.spread import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What kernels take for B sequences to which T tokens were appended, on the cache's device.

    block_table: i32[B, P]; entries past a sequence's last page are meaningless
    kv_len: i32[B], with the new tokens
    cu_q: i32[B + 1]; the new tokens of sequence b are cu_q[b] .. cu_q[b + 1] - 1
    slots: i64[T], page * page size + row: where each new token's keys and values belong
    counts: i32[B]; the rows of each sequence that are this rank's, where ranks share them (else None)
    own: i64, ascending, then which of the new tokens are this rank's; slots lists only these
    """

    block_table: torch.Tensor
    kv_len: torch.Tensor
    cu_q: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor | None = None
    own: torch.Tensor | None = None


Layout: TypeAlias = Literal["NHD", "HND"]

#: Of pools: what kernels read, and bytes in which whoever reads them finds rows of several types.
_TYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
)
#: Entries of the tables: kv_len begins at a multiple, so that kernels read it as aligned as its own memory.
_ALIGNMENT = 64
#: Numbers of i32 at whose multiples kernels take tensors for aligned.
_ALIGNED = 4


class _Entries(NamedTuple):
    """What changes in the tables. places, numbers: which entries, and what they become, those of the block
    table first; of_step: where these are in the block table of a step.
    """

    places: Sequence[int]
    numbers: Sequence[int]
    of_step: Sequence[int]


def _movable(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose rows torch can copy: 8 bits as bytes, since it copies no rows of float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


class PagedCache:
    """K and V of every layer in pages, and the tables that say which page holds which tokens (PagedAttention,
    arXiv 2309.06180).

    pages, page: their number, and their size in tokens; layers: each has pools of its own, and all share one
        block table
    kv_heads, head_dim, v_head_dim: sizes of K and V; v_head_dim None: as head_dim; 0: no V (`via prefix(k)`)
    sequences: rows of the block table; max_length: the most tokens of a sequence, which give its columns
    layout: "NHD" pages are [page, Hkv, D], "HND" pages are [Hkv, page, D]
    dtype: of the pools. With 8 bits (torch.float8_e4m3fn, float8_e5m2, int8), `write` takes numbers that have
        this type already: the cache neither scales nor rounds
    spread, rank: which rows of each sequence are here, if several ranks share them (`SpreadKeys`). Then every
        rank makes the same calls, for whole sequences, and its cache decides the same. A page has one number
        on all ranks, `page` rows on each, and holds ranks * page tokens

    block_table: i32[sequences, ceil(max_length / (ranks * page))]; kv_len: i32[sequences], lengths of whole
    sequences, 0 in a row without one. Both keep their addresses while the cache lives, so that captured CUDA
    graphs can read them. One page more than `pages` is allocated: rows without a sequence write there
    (`last_slots`).

    A sequence is a number that is never used again. Sizes and sequences may be integers of Python, NumPy or
    torch. A call that raises has changed nothing.

    Raises TypeError for bools and floats; ValueError for unknown and freed sequences, layers that do not
    exist and sizes below 1. Threads may not use a cache at the same time.
    """

    def __init__(
        self,
        *,
        pages: int,
        page: int,
        kv_heads: int,
        head_dim: int,
        sequences: int,
        max_length: int,
        layers: int = 1,
        v_head_dim: int | None = None,
        layout: Layout = "NHD",
        spread: Spread | None = None,
        rank: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        pages, page = check_size("pages", pages), check_size("page", page)
        kv_heads, head_dim = check_size("kv_heads", kv_heads), check_size("head_dim", head_dim)
        v_head_dim = head_dim if v_head_dim is None else check_size("v_head_dim", v_head_dim, least=0)
        sequences, max_length = check_size("sequences", sequences), check_size("max_length", max_length)
        layers = check_size("layers", layers)
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout: expected 'NHD' or 'HND', got {layout!r}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: expected a torch.dtype, got {show_value(dtype)}")
        if dtype not in _TYPES:
            raise TypeError(f"dtype: expected one of {', '.join(map(str, _TYPES))}, got {dtype}")
        if not isinstance(spread, Spread | None):
            raise TypeError(f"spread: expected a Spread or None, got {show_value(spread)}")
        self.spread = Spread(1, page) if spread is None else spread
        self.rank = to_integer("rank", rank)
        if page % self.spread.block or not 0 <= self.rank < self.spread.ranks:
            raise ValueError(
                f"spread: expected blocks that divide pages of {page} rows and ranks beyond {rank}, "
                f"got {self.spread}"
            )
        self.page = page
        self.pages = pages
        self.max_length = max_length
        self.layout = layout
        self.device = torch.device(device)
        inner = (page, kv_heads) if layout == "NHD" else (kv_heads, page)
        self._pools = tuple(
            torch.zeros((layers, pages + 1, *inner, size), dtype=dtype, device=self.device)
            for size in (head_dim, v_head_dim)
            if size
        )
        tokens = page * self.spread.ranks  # of all ranks, in a page of each
        width = -(-max_length // tokens)
        # The tables are one tensor, so that one operation changes both.
        self._lengths_at = -(-sequences * width // _ALIGNMENT) * _ALIGNMENT
        self._tables = torch.zeros(self._lengths_at + sequences, dtype=torch.int32, device=self.device)
        self.block_table = self._tables[: sequences * width].view(sequences, width).fill_(-1)
        self.kv_len = self._tables[self._lengths_at :]
        self._allocator = PageAllocator(pages=pages, page=tokens, sequences=sequences, max_length=max_length)

    def k(self, layer: int = 0) -> torch.Tensor:
        """Views K of a layer: [pages + 1, page, Hkv, D] for NHD, [pages + 1, Hkv, page, D] for HND."""
        return self._pools[0][self._layer(layer)]

    def v(self, layer: int = 0) -> torch.Tensor:
        """Views V of a layer, like `k`. ValueError if the cache was made without V."""
        if len(self._pools) < 2:
            raise ValueError("this cache has no V: it was made with v_head_dim = 0")
        return self._pools[1][self._layer(layer)]

    def __len__(self) -> int:
        return len(self._allocator)

    def length(self, sequence: int) -> int:
        return self._holding(sequence).length

    def row(self, sequence: int) -> int:
        """Returns the row of a sequence in `block_table` and `kv_len`, for kernels that run over all rows."""
        return self._holding(sequence).row

    def allocate(self) -> int:
        """Begins a new, empty sequence and returns its number. OutOfRows if the block table is full."""
        return self._begin(self._allocator.allocate())

    def append(self, sequences: Sequence[int], counts: int | Sequence[int] = 1) -> Step:
        """Makes room for `counts` new tokens at the end of each sequence; write them to the step's `slots`.

        A last page that others share is copied first (PagedAttention, section 4.4). Raises OutOfPages if
        there are too few pages, ValueError for a sequence named twice, a negative count or a length above
        max_length, TypeError for what is no integer; nothing is changed then.
        """
        sequences = to_integers("sequences", sequences)
        is_one = not isinstance(counts, Iterable) or getattr(counts, "ndim", None) == 0
        counts = [to_integer("counts", counts)] * len(sequences) if is_one else to_integers("counts", counts)
        change = self._allocator.grow(sequences, counts)
        step = self._make_step(change, counts)
        self._allocator.commit(change)
        return step

    def view(self, sequences: Sequence[int]) -> Step:
        return self.append(sequences, 0)

    def fork(self, sequence: int) -> int:
        """Begins a new sequence with the same tokens, in the same pages. OutOfRows if the block table is
        full.
        """
        return self._begin(self._allocator.fork(to_integer("sequence", sequence)))

    def truncate(self, sequence: int, length: int) -> None:
        """Drops the tokens from `length` on, such as rejected drafts. ValueError if there are fewer."""
        sequence, length = to_integer("sequence", sequence), to_integer("length", length)
        self._carry_out(self._allocator.truncate(sequence, length))

    def keep(self, sequences: Sequence[int], lengths: Sequence[int], places: Sequence[Sequence[int]]) -> None:
        """Keeps the first `lengths` tokens of each sequence and, right behind them, those at `places`, which
        ascend and are counted from there; drops all others. So the nodes of a tree of drafts that were
        accepted become the end of a sequence.

        Keys and values of all layers move, by one copy. ValueError for a sequence that is named twice, places
        that do not ascend or that there are not, tokens to be moved in a page that others share, and a cache
        of several ranks.
        """
        sequences, lengths = to_integers("sequences", sequences), to_integers("lengths", lengths)
        places = [to_integers("places", kept) for kept in places]
        if self.spread.ranks > 1:
            raise ValueError(f"keep: expected a cache of one rank, got one of {self.spread.ranks}")
        change = self._allocator.keep(sequences, lengths, places)
        entries = self._entries(change)
        both = list(zip(*change.moves, strict=True)) or [(), ()]
        (published, source, target), (numbers,) = self._upload([entries.places, *both], [entries.numbers])
        with self._moved(source, target):
            if entries.places:
                self._publish(published, numbers)
        self._allocator.commit(change)

    def free(self, *sequences: int) -> None:
        """Ends sequences; a page is free once nobody shares it. ValueError for one that is named twice."""
        self._carry_out(self._allocator.free(to_integers("sequences", sequences)))

    def write(
        self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None, layer: int = 0
    ) -> None:
        """Stores keys [T, Hkv, D] and values [T, Hkv, Dv] of a layer at slots: i64[T], without gradients.

        A row with slot -1 is not stored. Other slots that do not exist raise ValueError on a CPU; on a GPU,
        where a check would have to wait for the device, their rows are not stored either.

        Raises TypeError for another dtype than the cache's, or if slots are not i64; ValueError for another
        shape or device, for missing values, and for values if the cache has no V.
        """
        layer, device = self._layer(layer), self._tables.device
        check_tensor("slots", slots, torch.int64, ["T"], device)
        given = (k,) if v is None else (k, v)
        if len(given) != len(self._pools):
            raise ValueError(f"v: expected {'a tensor' if v is None else 'None'}, as the cache was made")
        pools = [self._by_slot(pool[layer]) for pool in self._pools]
        for name, pool, rows in zip("kv", pools, given, strict=False):
            check_tensor(name, rows, pool.dtype, [len(slots), *pool.shape[2:]], device)
        at: tuple[torch.Tensor, ...] = (self._bound_slots(slots),)
        if self.layout == "NHD":
            pools = [pool.flatten(0, 1) for pool in pools]
        else:
            at = (at[0] // self.page, at[0] % self.page)
        # Detached, or the pool would hold all that the rows were computed from.
        _store([_movable(pool) for pool in pools], at, [_movable(rows.detach()) for rows in given])

    def read(self, sequence: int, layer: int = 0) -> tuple[torch.Tensor, ...]:
        """Copies K [N, Hkv, D] and V [N, Hkv, Dv] of a sequence out of the pages that the device's tables
        name; N counts the rows that this rank has.
        """
        held, layer = self._holding(sequence), self._layer(layer)
        index = torch.arange(self.spread.count(held.length, self.rank), device=self.device)
        pages = self.block_table[held.row][index // self.page].long()
        views = (self._by_slot(_movable(pool)[layer]) for pool in self._pools)
        found = (view[pages, index % self.page] for view in views)
        return tuple(rows.view(pool.dtype) for rows, pool in zip(found, self._pools, strict=True))

    def last_slots(self) -> torch.Tensor:
        """Computes the slot of every row's last token, i64[sequences]. A row without a token, or whose last
        token another rank has, gets a slot of the spare page.

        Computed on the device from `block_table` and `kv_len`, so that it can be captured in a CUDA graph.
        """
        last = (self.kv_len.long() - 1).clamp(min=0)
        tokens = self.page * self.spread.ranks
        page = self.block_table.gather(1, (last // tokens)[:, None])[:, 0].long()
        has = self.kv_len > 0
        if self.spread.ranks > 1:
            has &= self.spread.rank(last) == self.rank
        page = torch.where(has, page, self.pages)
        return page * self.page + self.spread.row(last) % self.page

    def counts(self) -> torch.Tensor:
        """Counts on the device the rows of every sequence that this rank has, i32[sequences]."""
        return self.spread.counts(self.kv_len, self.rank)

    def statistics(self) -> Statistics:
        """Counts on the host how full the pages are and how much of them is shared."""
        return self._allocator.statistics()

    def sharers(self, sequence: int) -> tuple[int, ...]:
        """Counts, for each page of a sequence, how many sequences hold it."""
        return self._allocator.sharers(to_integer("sequence", sequence))

    def _holding(self, sequence: int) -> Holding:
        return self._allocator.holding(to_integer("sequence", sequence))

    def _layer(self, layer: int) -> int:
        layer, layers = to_integer("layer", layer), len(self._pools[0])
        if not 0 <= layer < layers:
            raise ValueError(f"layer: expected 0 .. {layers - 1}, got {layer}")
        return layer

    def _by_slot(self, pool: torch.Tensor) -> torch.Tensor:
        return pool if self.layout == "NHD" else pool.transpose(1, 2)

    def _bound_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns slots that are indices of rows: -1, the last one, is in the spare page, hence nowhere."""
        last = (self.pages + 1) * self.page - 1
        if slots.device.type == "cpu" and len(slots) and not torch.compiler.is_compiling():
            least, most = (int(bound) for bound in slots.aminmax())
            if least < -1 or most > last:
                raise ValueError(f"slots: expected -1 .. {last}, got {least if least < -1 else most}")
        return slots.clamp(-1, last)

    def _begin(self, change: Change) -> int:
        self._carry_out(change)
        ((sequence, _),) = change.begun
        return sequence

    @contextmanager
    def _moved(self, source: torch.Tensor, target: torch.Tensor) -> Iterator[None]:
        if not len(source):
            yield
            return
        of_heads = self.layout == "HND"
        pools = [pool.transpose(2, 3) if of_heads else pool for pool in map(_movable, self._pools)]
        here, there = ((slice(None), slots // self.page, slots % self.page) for slots in (source, target))
        moved, before = ([pool[at] for pool in pools] for at in (here, there))
        try:
            for pool, rows in zip(pools, moved, strict=True):
                pool[there] = rows
            yield
        except BaseException:
            for pool, rows in zip(pools, before, strict=True):
                pool[there] = rows
            raise

    def _carry_out(self, change: Change) -> None:
        entries = self._entries(change)
        if entries.places:
            (places,), (numbers,) = self._upload([entries.places], [entries.numbers])
            self._publish(places, numbers)
        self._allocator.commit(change)

    def _entries(self, change: Change) -> _Entries:
        """Lists the entries of the tables that change, and which of these a step of these sequences has
        too.
        """
        width, lengths_at = self.block_table.shape[1], self._lengths_at
        places, numbers, of_step = list[int](), list[int](), list[int]()
        rows, lengths = list[int](), list[int]()
        for b, (holding, length, keep, pages) in enumerate(change.edits):
            if pages:
                count = len(pages)
                places += range(holding.row * width + keep, holding.row * width + keep + count)
                of_step += range(b * width + keep, b * width + keep + count)
                numbers += pages
            if length != holding.length:
                rows.append(lengths_at + holding.row)
                lengths.append(length)
        return _Entries(places + rows, numbers + lengths, of_step)

    def _publish(self, places: torch.Tensor, numbers: torch.Tensor) -> None:
        self._tables.index_copy_(0, places, numbers)

    def _make_step(self, change: Change, counts: Sequence[int]) -> Step:
        """Makes the step of a change that is not published yet, with one copy to the device; then publishes
        it.
        """
        spread, slots, own = self.spread, change.slots, list[int]()
        if spread.ranks > 1:  # the allocator's pages hold the tokens of all ranks
            own = [i for i, slot in enumerate(slots) if spread.rank(slot) == self.rank]
            slots = [spread.row(slots[i]) for i in own]
        entries = self._entries(change)
        copied = [number for pair in change.copies for number in pair]
        (where, mine, of_step, places, pairs), (rows, kv_len, cu_q, numbers) = self._upload(
            [slots, own, entries.of_step, entries.places, copied],
            [
                [edit.holding.row for edit in change.edits],
                [edit.length for edit in change.edits],
                [0, *accumulate(counts)],
                entries.numbers,
            ],
        )
        block_table = self.block_table.index_select(0, rows)
        if entries.of_step:
            block_table.view(-1).index_copy_(0, of_step, numbers[: len(of_step)])
        is_spread = spread.ranks > 1
        step = Step(
            block_table=block_table,
            kv_len=kv_len,
            cu_q=cu_q,
            slots=where,
            counts=spread.counts(kv_len, self.rank) if is_spread else None,
            own=mine if is_spread else None,
        )
        if copied:
            source, target = pairs.view(-1, 2).unbind(1)
            for pool in map(_movable, self._pools):
                pool[:, target] = pool[:, source]
        if entries.places:
            self._publish(places, numbers)
        return step

    def _upload(
        self, wide: Sequence[Sequence[int]], narrow: Sequence[Sequence[int]]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Returns the first lists as i64 tensors and the second ones as i32, by one copy to the device. Each
        is as aligned as memory of its own. Pinned memory: the host does not wait for the copy.
        """
        numbers, sizes = list[int](), list[int]()
        for part in (*wide, *narrow):
            gap = -len(part) % _ALIGNED
            numbers += part
            numbers += (0,) * gap
            sizes += (len(part), gap)
        is_pinned = self.device.type == "cuda"
        host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        of_wide, of_narrow = sizes[: 2 * len(wide)], sizes[2 * len(wide) :]
        *parts, rest = host.to(self.device, non_blocking=True).split_with_sizes([*of_wide, sum(of_narrow)])
        return parts[::2], rest.int().split_with_sizes(of_narrow)[::2]


def _store(pools: Sequence[torch.Tensor], at: tuple[torch.Tensor, ...], rows: Sequence[torch.Tensor]) -> None:
    """Stores rows in the first pool and, if there is one, the second: in both or in none."""
    first, *others = zip(pools, rows, strict=True)
    is_captured = pools[0].is_cuda and torch.cuda.is_current_stream_capturing()
    before = first[0][at] if others and not is_captured else None  # a graph runs whole
    first[0].index_put_(at, first[1])
    try:
        for pool, new in others:
            pool.index_put_(at, new)
    except BaseException:
        if before is not None:
            first[0].index_put_(at, before)
        raise
