"""Text of declarations: calls, tuples and tables of Python, a line each where they are too long for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TypeAlias

from attnc.plan.sections import Section

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Words:
    """A string literal of words, over as many lines as it takes."""

    words: Sequence[str]


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple."""

    items: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Table:
    """A dict with strings as keys."""

    items: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Record:
    """A call of a class: arguments by position and by name."""

    name: str
    values: Sequence[Value] = ()
    fields: Mapping[str, Value] | None = None


#: A plain str is code as it is.
Value: TypeAlias = str | Words | Items | Table | Record


def printed(value: Value, first: str = "", last: str = "", indent: int = 0) -> list[str]:
    """The lines of `{first}{value}{last}`."""
    room, space = WIDTH - indent, " " * indent
    line = f"{first}{_flat(value)}{last}"
    if len(line) <= room or isinstance(value, str):
        return [f"{space}{line}"]
    if isinstance(value, Words):
        lines = wrap(" ".join(value.words), room - 7, break_long_words=False)
        inner = [f'{space}    "{text} "' for text in lines[:-1]] + [f'{space}    "{lines[-1]}"']
        return [f"{space}{first}(", *inner, f"{space}){last}"]
    opening, closing = _brackets(value)
    inner = [text for name, part in _parts(value) for text in printed(part, name, ",", indent + 4)]
    return [f"{space}{first}{opening}", *inner, f"{space}{closing}{last}"]


def quoted(text: str) -> str:
    """A string literal of words that need no escapes."""
    return f'"{text}"'


def in_words(text: str) -> Words:
    """A string literal of words with one blank between them."""
    return Words(text.split(" "))


def section(
    planned: Section | None, heads: str, rows: str, row_bytes: int, *, shared: str = "", tiles: str = "1"
) -> str:
    """How many of the heads a section has: a size, as text. rows: of the matrices that its programs read of a
    head; shared: what divides them among heads; tiles: of a head.
    """
    if planned is None:
        return "1"
    if planned.least == planned.most:
        return f"min({heads}, {planned.least})"
    part, whole = planned.cache
    room = f"l2() * {part} // {whole}" if part > 1 else f"l2() // {whole}"
    found = f"{heads}, {rows} * {row_bytes}{shared}, {room}"
    if planned.rounds:
        return f"even_section({found}, {planned.rounds} * multiprocessors(), {tiles})"
    limits = f", {planned.least}, {planned.most}" if planned.most is not None else ""
    return f"section({found}{limits})"


def _flat(value: Value) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Words):
        return quoted(" ".join(value.words))
    opening, closing = _brackets(value)
    parts = [f"{name}{_flat(part)}" for name, part in _parts(value)]
    comma = "," if isinstance(value, Items) and len(parts) == 1 else ""
    return f"{opening}{', '.join(parts)}{comma}{closing}"


def _brackets(value: Items | Table | Record) -> tuple[str, str]:
    match value:
        case Items():
            return "(", ")"
        case Table():
            return "{", "}"
        case Record(name=name):
            return f"{name}(", ")"


def _parts(value: Items | Table | Record) -> Iterator[tuple[str, Value]]:
    match value:
        case Items(items=items):
            yield from (("", item) for item in items)
        case Table(items=items):
            yield from ((f"{quoted(name)}: ", item) for name, item in items.items())
        case Record(values=values, fields=fields):
            yield from (("", item) for item in values)
            yield from ((f"{name}=", item) for name, item in (fields or {}).items())
