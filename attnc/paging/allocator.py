"""Which sequence holds which pages: lists and numbers on the host, which alone decide (no tensor is touched).

A page is shared by several sequences after a fork, and copied when one of them is to write into it
(PagedAttention, arXiv 2309.06180, sections 4.2 to 4.4). Statistics say how full the pages are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


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
        """Pages that at least one sequence holds."""
        return self.pages - self.free

    @property
    def waste(self) -> float:
        """Share of the held memory without a token in it; only last pages have such rows."""
        return 1 - self.stored / (self.held * self.page) if self.held else 0.0

    @property
    def saved(self) -> float:
        """Share of the pages that sharing saves, as in section 6.3 of the paper."""
        return 1 - self.held / self.alone if self.alone else 0.0


@dataclass(slots=True)
class Holding:
    """What a sequence holds: a row of the block table and its pages; len(pages) == ceil(length / page)."""

    row: int
    length: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a device must be told after sequences have grown.

    entries: (row, column, page) to be written to the block table; copies: (from, to) of pages to be copied
    slots: page * page size + row of every new token
    """

    holdings: Sequence[Holding]
    entries: Sequence[tuple[int, int, int]]
    copies: Sequence[tuple[int, int]]
    slots: Sequence[int]


class PageAllocator:
    """Pages and rows of a block table, given to sequences and taken back.

    Sequences are numbers that are never used twice; unknown and freed ones raise ValueError.
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
        try:
            return self._holdings[sequence]
        except KeyError:
            raise ValueError(f"sequence {sequence} was freed or never allocated") from None

    def allocate(self) -> int:
        """Returns a new, empty sequence. OutOfRows if the block table is full."""
        if not self._rows:
            raise OutOfRows(self._count)
        sequence, self._next = self._next, self._next + 1
        self._holdings[sequence] = Holding(self._rows.pop())
        return sequence

    def grow(self, sequences: Sequence[int], counts: Sequence[int]) -> Growth:
        """Gives each sequence pages for `counts` more tokens; a last page that others share is replaced.

        OutOfPages or ValueError (as `PagedCache.append` says): then nothing is changed.
        """
        holdings = [self.holding(sequence) for sequence in sequences]
        self._check_growth(sequences, holdings, counts)
        wanted = self._pages_to_take(holdings, counts)
        if len(wanted) > len(self._free):
            raise OutOfPages(len(wanted), len(self._free))
        entries: list[tuple[int, int, int]] = []
        copies: list[tuple[int, int]] = []
        for holding, column, shared in wanted:
            page = self._free.pop()
            self._sharers[page] = 1
            entries.append((holding.row, column, page))
            if shared is None:
                holding.pages.append(page)
            else:
                holding.pages[column] = page
                self._sharers[shared] -= 1
                copies.append((shared, page))
        slots: list[int] = []
        for holding, count in zip(holdings, counts, strict=True):
            if count == 1:  # decoding: worth a line of its own
                column, row = divmod(holding.length, self._page)
                slots.append(holding.pages[column] * self._page + row)
            else:
                slots += self._slots(holding, count)
            holding.length += count
        return Growth(holdings=holdings, entries=entries, copies=copies, slots=slots)

    def fork(self, sequence: int) -> int:
        """Returns a new sequence with the same tokens, in the same pages. OutOfRows if the block table is
        full.
        """
        parent = self.holding(sequence)
        child = self.allocate()
        holding = self._holdings[child]
        holding.length, holding.pages = parent.length, parent.pages.copy()
        for page in holding.pages:
            self._sharers[page] += 1
        return child

    def truncate(self, sequence: int, length: int) -> Holding:
        """Drops the tokens from `length` on. ValueError if there are fewer."""
        holding = self.holding(sequence)
        if not 0 <= length <= holding.length:
            raise ValueError(f"length: expected 0 .. {holding.length}, got {length}")
        keep = -(-length // self._page)
        self._release(holding.pages[keep:])
        del holding.pages[keep:]
        holding.length = length
        return holding

    def free(self, sequences: Sequence[int]) -> list[Holding]:
        """Ends sequences, and says what they held. ValueError: nothing was changed."""
        if len(set(sequences)) < len(sequences):
            raise ValueError(f"sequences: expected each once, got {list(sequences)}")
        holdings = [self.holding(sequence) for sequence in sequences]
        for sequence, holding in zip(sequences, holdings, strict=True):
            self._release(holding.pages)
            self._rows.append(holding.row)
            del self._holdings[sequence]
        return holdings

    def statistics(self) -> Statistics:
        """Returns how full the pages are and how much of them is shared."""
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
        """Counts, for each page of a sequence, how many sequences hold it."""
        return tuple(self._sharers[page] for page in self.holding(sequence).pages)

    def _check_growth(
        self, sequences: Sequence[int], holdings: Sequence[Holding], counts: Sequence[int]
    ) -> None:
        if len(counts) != len(holdings):
            raise ValueError(f"counts: expected one for each of {len(holdings)} sequences, got {len(counts)}")
        if len(set(sequences)) < len(sequences):
            raise ValueError(f"sequences: expected each once, got {list(sequences)}")
        for sequence, holding, count in zip(sequences, holdings, counts, strict=True):
            if count < 0:
                raise ValueError(f"counts: expected no negative number, got {count} for sequence {sequence}")
            room = self._max_length - holding.length
            if count > room:
                raise ValueError(f"counts: expected at most {room} for sequence {sequence}, got {count}")

    def _pages_to_take(
        self, holdings: Sequence[Holding], counts: Sequence[int]
    ) -> list[tuple[Holding, int, int | None]]:
        """Lists (sequence, column, page to copy or None) for every page that growing takes.

        Of n that share a last page and all grow, n - 1 copy it: the last to come has it for itself.
        """
        wanted: list[tuple[Holding, int, int | None]] = []
        left: dict[int, int] = {}
        for holding, count in zip(holdings, counts, strict=True):
            if count and holding.length % self._page:
                last = holding.pages[-1]
                if self._sharers[last] > 1 + left.get(last, 0):
                    left[last] = left.get(last, 0) + 1
                    wanted.append((holding, len(holding.pages) - 1, last))
            held, needed = len(holding.pages), -(-(holding.length + count) // self._page)
            if needed > held:
                wanted += ((holding, column, None) for column in range(held, needed))
        return wanted

    def _slots(self, holding: Holding, count: int) -> Iterable[int]:
        start, stop = holding.length, holding.length + count
        for column in range(start // self._page, -(-stop // self._page)):
            first = column * self._page
            base = holding.pages[column] * self._page - first
            yield from range(base + max(start, first), base + min(stop, first + self._page))

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._sharers[page] -= 1
            if not self._sharers[page]:
                self._free.append(page)
