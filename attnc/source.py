"""Spec text and places in it.

Offsets count characters (code points) from 0; lines and columns count from 1, as editors show them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class Source:
    """One spec file, held in memory. Two sources are equal only when they are the same object.

    `path` is what diagnostics print; it need not exist on disk (`<string>`, `<prelude>`).
    """

    path: str
    text: str

    @cached_property
    def _line_starts(self) -> tuple[int, ...]:
        return (0, *(i + 1 for i, char in enumerate(self.text) if char == "\n"))

    def position(self, offset: int) -> tuple[int, int]:
        """The (line, column) of an offset, both from 1; `len(text)` is a valid offset."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def line_start(self, line: int) -> int:
        """The offset of the first character of a line."""
        return self._line_starts[line - 1]

    def line_text(self, line: int) -> str:
        """A line without its line ending."""
        starts = self._line_starts
        end = starts[line] - 1 if line < len(starts) else len(self.text)
        return self.text[starts[line - 1] : end].removesuffix("\r")

    def span(self, start: int, end: int) -> Span:
        return Span(self, start, end)

    def __repr__(self) -> str:
        return f"Source({self.path!r}, {len(self.text)} characters)"


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range [start, end) of a source; empty spans mark a place between characters.

    Every tree node carries one in a field declared with `compare=False`: trees are equal when they say the
    same.
    """

    source: Source
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    @property
    def line(self) -> int:
        """The line of the first character."""
        return self.source.position(self.start)[0]

    @property
    def column(self) -> int:
        """The column of the first character."""
        return self.source.position(self.start)[1]

    @property
    def end_line(self) -> int:
        """The line of the last character (of the place itself, when empty)."""
        return self.source.position(max(self.start, self.end - 1))[0]

    def to(self, other: Span) -> Span:
        """From the start of this span to the end of a later one."""
        return Span(self.source, self.start, other.end)

    def __str__(self) -> str:
        line, column = self.source.position(self.start)
        return f"{self.source.path}:{line}:{column}"

    def __repr__(self) -> str:
        return f"<{self}>"
