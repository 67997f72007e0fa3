"""Locals of C++ that are declared where something reads them.

What is known of a tile, and how many rows, heads and sequences there are, is offered to kernels of all kinds
by the same text. `local` prints an offer; `settle` keeps of each the names that the rest of its block reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

#: What stands around an offer, and between its type, names and values: characters that no text has.
_START, _BETWEEN, _END = "\ue000", "\ue001", "\ue002"
_OFFER = re.compile(f"{_START}(.*?){_END}")
#: Words, braces, and what is no code. A field of another thing is no word.
_TOKEN = re.compile(r"//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|(?<![\w.])[A-Za-z_]\w*|[{}]")


def local(kind: str, values: Mapping[str, object] | None = None, /, **named: object) -> str:
    """`const int x = ..., y = ...;`, as far as it is read. Values have no effects, and may read names before
    them.
    """
    parts = (str(part) for pair in {**(values or {}), **named}.items() for part in pair)
    return f"{_START}{_BETWEEN.join((kind, *parts))}{_END}"


def sizes_of_call(names: Iterable[str], kind: str = "const int") -> Iterator[str]:
    """`const int M = args.M;`: sizes by their names, as far as they are read."""
    if values := {name: f"args.{name}" for name in names}:
        yield local(kind, values)


def settle(text: str) -> str:
    """The text with every offer as a declaration of what is read of it; no line where nothing is."""
    while (at := text.rfind(_START)) >= 0:  # from the end, so that what only unread locals read goes too
        offer = _OFFER.match(text, at)
        assert offer is not None
        kind, *parts = offer[1].split(_BETWEEN)
        read = set(_words_of_block(text, offer.end()))
        kept: list[str] = []
        for name, value in reversed(list(zip(parts[::2], parts[1::2], strict=True))):
            if name in read:
                kept.insert(0, f"{name} = {value}")
                read.update(_TOKEN.findall(value))
        if kept:
            text = f"{text[:at]}{kind} {', '.join(kept)};{text[offer.end() :]}"
        else:
            start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
            text = text[:start] + text[end + 1 :]
    return text


def _words_of_block(text: str, at: int) -> Iterator[str]:
    """Words of the code from a place to the end of the block that it is in."""
    depth = 0
    for token in _TOKEN.finditer(text, at):
        match token[0]:
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth < 0:
                    return
            case word:
                yield word
