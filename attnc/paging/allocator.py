"""Which sequence holds which pages: lists and numbers on the host, which alone decide (no tensor is touched).

A page is shared by several sequences after a fork, and copied when one of them is to write into it
(PagedAttention, arXiv 2309.06180, sections 4.2 to 4.4). Statistics say how full the pages are.

A call is planned first, as a `Change`, which says what the device has to be told. Lists change in `commit`,
when the device knows: a call that fails before that has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class CacheFull(RuntimeError):
    """The cache has no room for what was asked. Nothing was changed: free sequences, then ask again."""


class OutOfPages(CacheFull):
    """There are too few pages: `needed` were asked for, and `free` are left. Nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} pages are needed and {free} are free; nothing was changed")
        self.needed = needed
        self.free = free


class OutOfRows(CacheFull):
    """There is no row for another sequence: all `rows` of the block table hold one. Nothing was changed."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"all {rows} rows of the block table hold a sequence; nothing was changed")
        self.rows = rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """How the memory is used, in pages and tokens of one layer.

    pages, free: pages there are, and pages that nobody holds
    tokens: lengths of all sequences, summed
    stored: rows of held pages with a token in them, each counted once however many sequences share it
    alone: pages that the sequences would hold if none was shared
    """

    pages: int
    page: int
    free: int
    tokens: int
    stored: int
    alone: int

    @property
    def held(self) -> int:
        return self.pages - self.free

    @property
    def waste(self) -> float:
        return 1 - self.stored / (self.held * self.page) if self.held else 0.0

    @property
    def saved(self) -> float:
        return 1 - self.held / self.alone if self.alone else 0.0


@dataclass(slots=True)
class Holding:
    """What a sequence holds: a row of the block table and its pages; len(pages) == ceil(length / page)."""

    row: int
    length: int = 0
    pages: list[int] = field(default_factory=list)


class Edit(NamedTuple):
    """What a sequence is to hold: its first `keep` pages, `pages` behind them, and `length` tokens in all."""

    holding: Holding
    length: int
    keep: int
    pages: Sequence[int] = ()

    def page(self, column: int) -> int:
        return self.holding.pages[column] if column < self.keep else self.pages[column - self.keep]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a call does, before it is done.

    edits: of the sequences that it names, in its order
    taken: pages that leave the list of free ones, from its end
    copies: (from, to) of pages to be copied; slots: page * page size + row of every new token
    moves: (from, to) of slots: tokens that are kept and move forward
    begun: the sequences that begin with it; ended: those that end
    """

    edits: Sequence[Edit]
    taken: int = 0
    copies: Sequence[tuple[int, int]] = ()
    slots: Sequence[int] = ()
    moves: Sequence[tuple[int, int]] = ()
    begun: Sequence[tuple[int, Holding]] = ()
    ended: Sequence[int] = ()


class PageAllocator:
    """Pages and rows of a block table, given to sequences and taken back.

    Sequences are numbers that are never used twice; unknown and freed ones raise ValueError. `allocate`,
    `grow`, `fork`, `truncate`, `keep` and `free` plan a change and leave everything as it is; `commit` makes
    it. A plan is good until the next commit.
    """

    def __init__(self, *, pages: int, page: int, sequences: int, max_length: int) -> None:
        self._page = page
        self._max_length = max_length
        self._count = sequences
        self._holdings: dict[int, Holding] = {}
        self._sharers = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self._rows = list(range(sequences - 1, -1, -1))
        self._next = 0

    def __len__(self) -> int:
        return len(self._holdings)

    def holding(self, sequence: int) -> Holding:
        return self.holdings([sequence])[0]

    def holdings(self, sequences: Iterable[int]) -> list[Holding]:
        """Returns the pages that each sequence holds. ValueError for one that is unknown or freed."""
        known = self._holdings
        try:
            return [known[sequence] for sequence in sequences]
        except KeyError as missing:
            raise ValueError(f"sequence {missing} was freed or never allocated") from None

    def allocate(self) -> Change:
        """Plans a new, empty sequence. OutOfRows if the block table is full."""
        holding = self._next_row()
        return Change(edits=(), begun=[(self._next, holding)])

    def grow(self, sequences: Sequence[int], counts: Sequence[int]) -> Change:
        """Plans pages for `counts` more tokens of each sequence; a last page that others share is replaced.

        OutOfPages or ValueError as `PagedCache.append` says.
        """
        holdings = self.holdings(sequences)
        self._check_growth(sequences, holdings, counts)
        size, free, sharers, taken = self._page, self._free, self._sharers, 0
        edits: list[Edit] = []
        copies: list[tuple[int, int]] = []
        slots: list[int] = []
        left: dict[int, int] = {}
        for holding, count in zip(holdings, counts, strict=True):
            pages, start = holding.pages, holding.length
            if count == 1 and start % size and sharers[pages[-1]] == 1:  # decoding is mostly this
                edits.append(Edit(holding, start + 1, len(pages)))
                slots.append(pages[-1] * size + start % size)
                continue
            shared = self._page_to_copy(holding, count, left)
            keep = len(pages) - (shared is not None)
            wanted = -(-(start + count) // size) - keep
            edit = Edit(holding, start + count, keep, free[len(free) - taken - wanted : len(free) - taken])
            taken += wanted
            if taken > len(free):
                continue  # only to count how many are needed
            edits.append(edit)
            if count == 1:
                slots.append(edit.page(start // size) * size + start % size)
            else:
                slots += self._slots(edit)
            if shared is not None:
                copies.append((shared, edit.pages[0]))
        if taken > len(free):
            raise OutOfPages(taken, len(free))
        return Change(edits=edits, taken=taken, copies=copies, slots=slots)

    def fork(self, sequence: int) -> Change:
        """Plans a new sequence with the same tokens, in the same pages. OutOfRows if the block table is
        full.
        """
        parent, child = self.holding(sequence), self._next_row()
        edit = Edit(child, parent.length, 0, parent.pages.copy())
        return Change(edits=[edit], begun=[(self._next, child)])

    def truncate(self, sequence: int, length: int) -> Change:
        """Plans to drop the tokens from `length` on. ValueError if there are fewer."""
        holding = self.holding(sequence)
        if not 0 <= length <= holding.length:
            raise ValueError(f"length: expected 0 .. {holding.length}, got {length}")
        return Change(edits=[Edit(holding, length, -(-length // self._page))])

    def keep(
        self, sequences: Sequence[int], lengths: Sequence[int], places: Sequence[Sequence[int]]
    ) -> Change:
        """Plans to keep the first tokens of each sequence and, right behind them, those at the given places,
        counted from there. ValueError as `PagedCache.keep` says.
        """
        _check_distinct(sequences)
        if not len(sequences) == len(lengths) == len(places):
            raise ValueError(
                f"expected lengths and places of {len(sequences)} sequences, got {len(lengths)} and"
                f" {len(places)}"
            )
        edits: list[Edit] = []
        moves: list[tuple[int, int]] = []
        for sequence, start, kept in zip(sequences, lengths, places, strict=True):
            holding = self.holding(sequence)
            _check_places(sequence, start, kept, holding.length)
            edits.append(Edit(holding, start + len(kept), -(-(start + len(kept)) // self._page)))
            for at, place in enumerate(kept):
                if at != place:
                    moves.append((self._slot(holding, start + place), self._slot(holding, start + at)))
                    if self._sharers[holding.pages[(start + at) // self._page]] > 1:
                        raise ValueError(
                            f"places: expected tokens of sequence {sequence} alone, got some in pages that"
                            " others share"
                        )
        return Change(edits=edits, moves=moves)

    def free(self, sequences: Sequence[int]) -> Change:
        """Plans to end sequences. ValueError for one that is unknown or named twice."""
        _check_distinct(sequences)
        holdings = self.holdings(sequences)
        return Change(edits=[Edit(holding, 0, 0) for holding in holdings], ended=sequences)

    def commit(self, change: Change) -> None:
        del self._free[len(self._free) - change.taken :]
        for sequence, holding in change.begun:
            self._rows.pop()
            self._holdings[sequence] = holding
            self._next = sequence + 1
        for holding, length, keep, new in change.edits:
            pages, holding.length = holding.pages, length
            if new or keep < len(pages):
                for page in new:
                    self._sharers[page] += 1
                self._release(pages[keep:])
                pages[keep:] = new
        for sequence in change.ended:
            self._rows.append(self._holdings.pop(sequence).row)

    def statistics(self) -> Statistics:
        filled: dict[int, int] = {}
        for holding in self._holdings.values():
            for column, page in enumerate(holding.pages):
                rows = min(self._page, holding.length - column * self._page)
                filled[page] = max(rows, filled.get(page, 0))
        return Statistics(
            pages=len(self._sharers),
            page=self._page,
            free=len(self._free),
            tokens=sum(holding.length for holding in self._holdings.values()),
            stored=sum(filled.values()),
            alone=sum(len(holding.pages) for holding in self._holdings.values()),
        )

    def sharers(self, sequence: int) -> tuple[int, ...]:
        return tuple(self._sharers[page] for page in self.holding(sequence).pages)

    def _next_row(self) -> Holding:
        if not self._rows:
            raise OutOfRows(self._count)
        return Holding(self._rows[-1])

    def _check_growth(
        self, sequences: Sequence[int], holdings: Sequence[Holding], counts: Sequence[int]
    ) -> None:
        if len(counts) != len(holdings):
            raise ValueError(f"counts: expected one for each of {len(holdings)} sequences, got {len(counts)}")
        _check_distinct(sequences)
        for sequence, holding, count in zip(sequences, holdings, counts, strict=True):
            if count < 0:
                raise ValueError(f"counts: expected no negative number, got {count} for sequence {sequence}")
            room = self._max_length - holding.length
            if count > room:
                raise ValueError(f"counts: expected at most {room} for sequence {sequence}, got {count}")

    def _page_to_copy(self, holding: Holding, count: int, left: dict[int, int]) -> int | None:
        """Returns the last page of a sequence if others share it, which is copied before it is written to.

        left: by page, how many sequences of this call gave up their share before. So if n sequences share a
        page and all grow, n - 1 of them copy it, and the last one keeps it.
        """
        if not count or not holding.length % self._page:
            return None
        page = holding.pages[-1]
        if self._sharers[page] == 1 + left.get(page, 0):
            return None
        left[page] = left.get(page, 0) + 1
        return page

    def _slot(self, holding: Holding, at: int) -> int:
        return holding.pages[at // self._page] * self._page + at % self._page

    def _slots(self, edit: Edit) -> Iterator[int]:
        start, stop, size = edit.holding.length, edit.length, self._page
        for column in range(start // size, -(-stop // size)):
            first = column * size
            base = edit.page(column) * size - first
            yield from range(base + max(start, first), base + min(stop, first + size))

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._sharers[page] -= 1
            if not self._sharers[page]:
                self._free.append(page)


def _check_places(sequence: int, start: int, places: Sequence[int], length: int) -> None:
    if not 0 <= start <= length:
        raise ValueError(f"lengths: expected 0 .. {length} for sequence {sequence}, got {start}")
    ascends = all(a < b for a, b in pairwise(places))
    if places and not (ascends and places[0] >= 0 and places[-1] < length - start):
        raise ValueError(
            f"places: expected ascending numbers of 0 .. {length - start - 1} for sequence {sequence}, got"
            f" {list(places)}"
        )


def _check_distinct(sequences: Sequence[int]) -> None:
    if len(set(sequences)) < len(sequences):
        raise ValueError(f"sequences: expected each once, got {list(sequences)}")
