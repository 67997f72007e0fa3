"""The pools and the tables on the device, kept as the allocator on the host decides, and what
a step gives to kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import index
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from attnc.paging.allocator import Growth, PageAllocator, Statistics

_Position = TypeVar("_Position", int, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Spread:
    """Says where keys lie that ranks share: blocks of `block` keys go round `ranks`. Position p of a sequence
    is row (p // (ranks * block)) * block + p % block of rank p // block % ranks, so that sequences that grow
    do so everywhere. The first rank never has fewer than another.
    """

    ranks: int
    block: int

    def rank(self, position: _Position) -> _Position:
        """Returns the rank that has the key at each position."""
        return position // self.block % self.ranks

    def row(self, position: _Position) -> _Position:
        """Returns which row of its rank's cache the key at each position is."""
        return position // (self.block * self.ranks) * self.block + position % self.block

    def count(self, length: int, rank: int) -> int:
        """Counts the keys that a rank has of a sequence of this length."""
        round_ = self.block * self.ranks
        return length // round_ * self.block + min(max(length % round_ - rank * self.block, 0), self.block)

    def counts(self, lengths: torch.Tensor, rank: int) -> torch.Tensor:
        """Counts the same of many sequences, as a tensor of the type of lengths, without a wait."""
        round_ = self.block * self.ranks
        return lengths // round_ * self.block + (lengths % round_ - rank * self.block).clamp(0, self.block)

    def longest(self, rows: int, rank: int) -> int:
        """Returns the length of the longest sequence of which a rank has no more than these rows."""
        return (rows // self.block * self.ranks + rank) * self.block + rows % self.block

    def positions(self, rows: int, rank: int, device: torch.device) -> torch.Tensor:
        """Returns the positions of a rank's first rows, ascending, i32."""
        row = torch.arange(rows, dtype=torch.int32, device=device)
        return row // self.block * (self.block * self.ranks) + rank * self.block + row % self.block


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What kernels take for B sequences to which T tokens were appended, on the cache's device.

    block_table: i32[B, P]; entries past a sequence's last page are meaningless
    kv_len: i32[B], with the new tokens
    cu_q: i32[B + 1]; the new tokens of sequence b are cu_q[b] .. cu_q[b + 1] - 1
    slots: i64[T], page * page size + row: where each new token's keys and values belong
    counts: i32[B]; the rows of each sequence that are this rank's, where ranks share them (else None)
    own: then which of the new tokens are this rank's, ascending, i64; slots has these alone
    """

    block_table: torch.Tensor
    kv_len: torch.Tensor
    cu_q: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor | None = None
    own: torch.Tensor | None = None


Layout: TypeAlias = Literal["NHD", "HND"]


def _check_rows(name: str, given: Any, dtype: torch.dtype) -> None:
    """TypeError for what is no tensor of this type."""
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(given).__name__}")
    if given.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {given.dtype}")


def _movable(x: torch.Tensor) -> torch.Tensor:
    """Returns the elements, of 8 bits as bytes: torch moves no rows of its float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _integers(name: str, given: Any) -> list[int]:
    """Returns numbers as Python's own, which nobody changes in place. TypeError for what is none."""
    try:
        return [index(number) for number in given]
    except TypeError:
        raise TypeError(f"{name}: expected integers, got {given!r}") from None


class PagedCache:
    """K and V of every layer in pages, and the tables that say which page holds which tokens.

    pages, page: their number and their size in tokens; layers: each has pools of its own, under one table
    kv_heads, head_dim, v_head_dim: sizes of K and V; v_head_dim None: as head_dim; 0: no V (`via prefix(k)`)
    sequences: rows of the block table; max_length: tokens that one sequence may have, hence its columns
    layout: "NHD" pages are [page, Hkv, D], "HND" pages are [Hkv, page, D]
    dtype: of the pools; one of 8 bits too (torch.float8_e4m3fn, float8_e5m2, int8), of which `write` takes
    what it stores: nothing is scaled or rounded here
    spread, rank: which rows of each sequence this cache has where ranks share them (`SpreadKeys`), else None.
    Every rank's cache is told the same, of whole sequences, and decides the same: a page of `page` rows on
    each of them holds ranks * page tokens, has one number, and is shared, copied and missing on all of them.

    block_table: i32[sequences, ceil(max_length / (ranks * page))] and kv_len: i32[sequences], of whole
    sequences, stay where they are while the cache lives, so that a captured CUDA graph may read them; a row
    without a sequence has kv_len 0.
    One page more than `pages` is allocated, for what `last_slots` has free rows write.

    Sequences are numbers that are never used twice. Unknown and freed ones raise ValueError, as do sizes
    below one. Not for use by several threads at once.
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
        sizes = {"pages": pages, "page": page, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes |= {"sequences": sequences, "max_length": max_length, "layers": layers}
        if v_head_dim is not None:
            sizes["v_head_dim"] = v_head_dim
        for name, size in sizes.items():
            if not hasattr(size, "__index__"):
                raise TypeError(f"{name}: expected an integer, got {size!r}")
            if size < (least := int(name != "v_head_dim")):
                raise ValueError(f"{name}: expected at least {least}, got {size}")
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout: expected 'NHD' or 'HND', got {layout!r}")
        self.spread = Spread(1, page) if spread is None else spread
        if self.spread.block < 1 or page % self.spread.block or not 0 <= rank < self.spread.ranks:
            raise ValueError(
                f"spread: expected blocks that divide pages of {page} rows and ranks beyond {rank}, "
                f"got {self.spread}"
            )
        self.rank = rank
        self.page = page
        self.pages = pages
        self.max_length = max_length
        self.layout = layout
        self.device = torch.device(device)
        inner = (page, kv_heads) if layout == "NHD" else (kv_heads, page)
        self._pools = tuple(
            torch.zeros((layers, pages + 1, *inner, size), dtype=dtype, device=self.device)
            for size in (head_dim, head_dim if v_head_dim is None else v_head_dim)
            if size
        )
        tokens = page * self.spread.ranks
        width = -(-max_length // tokens)
        self.block_table = torch.full((sequences, width), -1, dtype=torch.int32, device=self.device)
        self.kv_len = torch.zeros(sequences, dtype=torch.int32, device=self.device)
        self._allocator = PageAllocator(pages=pages, page=tokens, sequences=sequences, max_length=max_length)

    def k(self, layer: int = 0) -> torch.Tensor:
        """Views K of a layer: [pages + 1, page, Hkv, D] for NHD, [pages + 1, Hkv, page, D] for HND."""
        return self._pools[0][layer]

    def v(self, layer: int = 0) -> torch.Tensor:
        """Views V of a layer, like `k`. ValueError if the cache was made without V."""
        if len(self._pools) < 2:
            raise ValueError("this cache has no V: it was made with v_head_dim = 0")
        return self._pools[1][layer]

    def __len__(self) -> int:
        return len(self._allocator)

    def length(self, sequence: int) -> int:
        """Returns how many tokens a sequence has."""
        return self._allocator.holding(sequence).length

    def row(self, sequence: int) -> int:
        """Returns the row of a sequence in `block_table` and `kv_len`, for kernels that run over all rows."""
        return self._allocator.holding(sequence).row

    def allocate(self) -> int:
        """Begins a new, empty sequence and returns its number. OutOfRows if the block table is full."""
        return self._allocator.allocate()

    def append(self, sequences: Sequence[int], counts: int | Sequence[int] = 1) -> Step:
        """Makes room for `counts` new tokens at the end of each sequence; write them to the step's `slots`.

        A last page that others share is copied first (PagedAttention, section 4.4). Raises OutOfPages if
        there are too few pages, ValueError for a sequence named twice, a negative count or a length above
        max_length, TypeError for what is no integer; nothing is changed then.
        """
        sequences = _integers("sequences", sequences)
        is_one = isinstance(counts, int) or getattr(counts, "ndim", None) == 0
        counts = _integers("counts", [counts] * len(sequences) if is_one else counts)
        return self._publish(self._allocator.grow(sequences, counts), counts)

    def view(self, sequences: Sequence[int]) -> Step:
        """Returns the step of these sequences with no new token."""
        return self.append(sequences, 0)

    def fork(self, sequence: int) -> int:
        """Begins a new sequence with the same tokens, in the same pages. OutOfRows if the block table is
        full.
        """
        child = self._allocator.fork(sequence)
        source, target = self.row(sequence), self.row(child)
        self.block_table[target].copy_(self.block_table[source])
        self.kv_len[target].copy_(self.kv_len[source])
        return child

    def truncate(self, sequence: int, length: int) -> None:
        """Drops the tokens from `length` on, such as rejected drafts. ValueError if there are fewer."""
        (length,) = _integers("length", [length])
        self.kv_len[self._allocator.truncate(sequence, length).row].fill_(length)

    def free(self, *sequences: int) -> None:
        """Ends sequences; a page is free once nobody shares it. ValueError: nothing was changed."""
        for holding in self._allocator.free(sequences):
            self.kv_len[holding.row].fill_(0)

    def write(
        self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None, layer: int = 0
    ) -> None:
        """Stores keys [T, Hkv, D] and values [T, Hkv, Dv] of a layer at slots: i64[T]. No gradients flow
        through it.

        TypeError for a dtype that is not the cache's, or slots that are not i64. ValueError for another
        shape, for missing values, and for values where the cache has none.
        """
        _check_rows("slots", slots, torch.int64)
        if slots.dim() != 1:
            raise ValueError(f"slots: expected shape [T], got {list(slots.shape)}")
        given = (k,) if v is None else (k, v)
        if len(given) != len(self._pools):
            raise ValueError(f"v: expected {'a tensor' if v is None else 'None'}, as the cache was made")
        for name, pool, rows in zip("kv", self._pools, given, strict=False):
            _check_rows(name, rows, pool.dtype)
            pool, rows = _movable(pool), _movable(rows)
            slot_major = pool[layer] if self.layout == "NHD" else pool[layer].transpose(1, 2)
            wanted = (len(slots), *slot_major.shape[2:])
            if rows.shape != wanted:
                raise ValueError(f"{name}: expected shape {list(wanted)}, got {list(rows.shape)}")
            rows = rows.detach()  # or the pool would hold all that they were computed from
            if self.layout == "NHD":
                slot_major.flatten(0, 1).index_copy_(0, slots, rows)
            else:
                slot_major[slots // self.page, slots % self.page] = rows

    def read(self, sequence: int, layer: int = 0) -> tuple[torch.Tensor, ...]:
        """Copies out K [N, Hkv, D] and V [N, Hkv, Dv] of a sequence, found through the device's tables: of
        the rows that this rank has.
        """
        held = self._allocator.holding(sequence)
        index = torch.arange(self.spread.count(held.length, self.rank), device=self.device)
        pages = self.block_table[held.row][index // self.page].long()
        heads_last = self.layout == "NHD"
        layers = (_movable(pool)[layer] for pool in self._pools)
        views = (pool if heads_last else pool.transpose(1, 2) for pool in layers)
        found = (view[pages, index % self.page] for view in views)
        return tuple(rows.view(pool.dtype) for rows, pool in zip(found, self._pools, strict=True))

    def last_slots(self) -> torch.Tensor:
        """Computes the slot of every row's last token, i64[sequences]; in the spare page for a row without a
        token, and for a token that another rank has.

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
        return self._allocator.sharers(sequence)

    def _publish(self, growth: Growth, counts: Sequence[int]) -> Step:
        """Brings the device up to date with one copy to it, and gathers the rows concerned."""
        spread, slots, own = self.spread, growth.slots, list[int]()
        if spread.ranks > 1:  # the allocator's pages hold the tokens of all ranks
            own = [i for i, slot in enumerate(slots) if spread.rank(slot) == self.rank]
            slots = [spread.row(slots[i]) for i in own]
        rows, lengths, cu_q, where, table, copied, mine = self._upload(
            [holding.row for holding in growth.holdings],
            [holding.length for holding in growth.holdings],
            [0, *accumulate(counts)],
            slots,
            [number for entry in growth.entries for number in entry],
            [number for pair in growth.copies for number in pair],
            own,
        )
        if growth.entries:
            row, column, page = table.view(-1, 3).unbind(1)
            self.block_table[row, column] = page.int()
        if growth.copies:
            source, target = copied.view(-1, 2).unbind(1)
            for pool in map(_movable, self._pools):
                pool[:, target] = pool[:, source]
        kv_len = lengths.int()
        if growth.slots:
            self.kv_len[rows] = kv_len
        is_spread = spread.ranks > 1
        return Step(
            block_table=self.block_table[rows],
            kv_len=kv_len,
            cu_q=cu_q.int(),
            slots=where.clone(),
            counts=spread.counts(kv_len, self.rank) if is_spread else None,
            own=mine.clone() if is_spread else None,
        )

    def _upload(self, *lists: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Returns the lists as i64 tensors on the device. Pinned memory: the host does not wait
        for the copy.
        """
        numbers = [number for numbers in lists for number in numbers]
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return torch.split_with_sizes(host.to(self.device, non_blocking=True), [len(part) for part in lists])
