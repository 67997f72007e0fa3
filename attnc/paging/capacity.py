"""How full the pages are, and the errors of a cache without room."""

from __future__ import annotations

from dataclasses import dataclass


class CacheFull(RuntimeError):
    """The cache has no room for what was asked. Nothing was changed: free sequences, then ask again."""


class OutOfPages(CacheFull):
    """`needed` pages were asked for, and `free` are left."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} pages are needed and {free} are free; nothing was changed")
        self.needed = needed
        self.free = free


class OutOfRows(CacheFull):
    """Every row of the block table holds a sequence."""

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
