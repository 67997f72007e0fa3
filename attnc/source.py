"""Spec text and places in it.

Offsets count characters (code points) from 0; lines and columns count from 1, as editors show them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

#: In place of a spec file: standard input.
STDIN = Path("-")
#: What decides where a statement ends: comments, brackets, line ends.
_STRUCTURE = re.compile(r"#[^\n]*|[()\[\]\n]")
_COMMENT = re.compile(r"#[^\n]*")


def visible(text: str, keep: str = "") -> str:
    """Returns the text on one line, harmless to a terminal: controls, line ends, direction marks and
    everything else that is not printable become their number, as in `<U+202E>`. keep: those to leave as they
    are.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else f"<U+{ord(char):04X}>" for char in text)


def join_lines(text: str) -> str:
    """Returns spec text on one line, without its comments (the language has no strings, so every `#` starts
    one).
    """
    first, *rest = (line.strip() for line in _COMMENT.sub("", text).split("\n"))
    whole = " ".join(line for line in (first, *rest) if line)
    return re.sub(r"(?<=[(\[]) | (?=[)\]])", "", whole) if rest else whole


@dataclass(frozen=True, eq=False)
class Source:
    """One spec file, held in memory. Two sources are equal only when they are the same object.

    `path` is what diagnostics print; it need not exist on disk (`<string>`, `<prelude>`).
    """

    path: str
    text: str

    @cached_property
    def _line_starts(self) -> tuple[int, ...]:
        return (0, *(match.end() for match in re.finditer("\n", self.text)))

    @cached_property
    def _statement_starts(self) -> tuple[int, ...]:
        """Offsets of lines that no bracket continues."""
        starts, depth = [0], 0
        for match in _STRUCTURE.finditer(self.text):
            char = match.group()
            depth = max(depth + (char in "([") - (char in ")]"), 0)
            if char == "\n" and depth == 0:
                starts.append(match.end())
        return tuple(starts)

    def statement(self, offset: int) -> Span:
        """Returns the lines of the statement around an offset: one line, and those that its brackets continue
        it on.
        """
        starts = self._statement_starts
        at = bisect_right(starts, offset)
        return Span(self, starts[at - 1], starts[at] - 1 if at < len(starts) else len(self.text))

    def position(self, offset: int) -> tuple[int, int]:
        """Returns the (line, column) of an offset, both from 1; `len(text)` is a valid offset."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def line_start(self, line: int) -> int:
        return self._line_starts[line - 1]

    def line_text(self, line: int) -> str:
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
        return self.source.position(self.start)[0]

    @property
    def end_line(self) -> int:
        return self.source.position(max(self.start, self.end - 1))[0]

    def to(self, other: Span) -> Span:
        return Span(self.source, self.start, other.end)

    def __str__(self) -> str:
        line, column = self.source.position(self.start)
        return f"{self.source.path}:{line}:{column}"

    def __repr__(self) -> str:
        return f"<{self}>"
