"""The last touch on C++ text: no stray blank lines, no line wider than a page.

Neither changes what is compiled. Lines break at commas and operators, outermost brackets first; a remark at
the end of a line that is too wide goes in front of it.
"""

from __future__ import annotations

import re
import textwrap
from collections import deque
from collections.abc import Iterator

from attnc.target.sm80.printer import settle
from attnc.target.templates import drop_empty_lines, split_outside_brackets, trim_lines

WIDTH = 120
#: Where a line may break, best first: behind commas, then before operators, those that bind least first.
_BREAKS = tuple(
    re.compile(text)
    for text in (
        r"(?<=[,;]) | (?=\w+\(const __grid_constant__)", r"(?<= =) ", r" (?=[?:] )", r" (?=\|\| )",
        r" (?=&& )",
        r" (?=(?:[!=]=|[<>]=?) )", r" (?=[|^&] )", r" (?=[+-] )", r" (?=[*/%] )",
    )
)  # fmt: skip
_BRACKET = re.compile(r'["()\[\]{}]')
#: The first header of a kernel, and what another one is for.
_FIRST_HEADER = re.compile(r'^#include "sm\d\d\.cuh"$', re.MULTILINE)
_DIVIDES = re.compile(r"\bfloor_(?:div|mod)_by_any\(")
#: A function on one line: what stands before its body, the body, and what ends it.
_FUNCTION = re.compile(r"(\s*\S.*\)) \{ (.+;) \}(;?)")
_COMMENT = re.compile(r"^([ \t]*)//( *)((?:- )?)(.*)$")
_REMARK = re.compile(r'^((?:[^"/]|"(?:\\.|[^"\\])*"|/(?!/))*?)\s*// (.*)$')


def tidy_cuda(text: str) -> str:
    """Returns one blank line in a row, none at a block's start or end, pragmas indented like what they are
    about, and lines of at most `WIDTH` columns. What divides by sizes of any sign includes how.
    """
    if "_by_any(" in text and _DIVIDES.search(text):
        text = _FIRST_HEADER.sub(r'\g<0>\n#include "division.cuh"', text, count=1)
    text = trim_lines(drop_empty_lines(text))
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"^[ \t]*(#pragma unroll(?: \d+)?)\n([ \t]*)", r"\2\1\n\2", text, flags=re.M)
    text = re.sub(r"(\{)\n\n", r"\1\n", text)
    text = re.sub(r"\n\n([ \t]*\})", r"\n\1", text)
    return "\n".join(wrap_lines(settle(text.strip("\n")))) + "\n"


def wrap_lines(text: str) -> Iterator[str]:
    """Yields the lines of a text, each that is too wide as several."""
    lines = deque(text.split("\n"))
    while lines:
        line = lines.popleft()
        if len(line) <= WIDTH or line.endswith("\\"):
            yield line
        elif comment := _COMMENT.match(line):
            yield from _fill_paragraph(comment, lines)
        elif remark := _REMARK.match(line):
            indent = " " * (len(line) - len(line.lstrip()))
            yield from _fill(f"{indent}// ", f"{indent}// ", remark[2])
            yield from wrap_code(remark[1])
        else:
            yield from wrap_code(line)


def _fill_paragraph(comment: re.Match[str], lines: deque[str]) -> list[str]:
    start = f"{comment[1]}//{comment[2]}"
    further = f"{start}{' ' * len(comment[3])}"
    words = [comment[4]]
    while lines and (more := _COMMENT.match(lines[0])) is not None:
        if f"{more[1]}//{more[2]}" != further or more[3] or not more[4]:
            break
        words.append(more[4])
        lines.popleft()
    return _fill(f"{start}{comment[3]}", further, " ".join(words))


def _fill(first: str, further: str, words: str) -> list[str]:
    return textwrap.wrap(
        words,
        WIDTH,
        initial_indent=first,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def wrap_code(line: str, width: int = WIDTH) -> list[str]:
    """Returns a statement as lines, the later ones indented; of a function with its body on one line, that
    body on its own lines. A directive, or a line without a place to break, stays whole.
    """
    if line.lstrip().startswith("#"):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    further = f"{indent}    "
    if len(line) > width and (function := _FUNCTION.fullmatch(line)) is not None:
        head, body, end = function.groups()
        if _is_whole(head) and _is_whole(body):
            statements = (f"{further}{text};" for text in split_outside_brackets(body[:-1], "; "))
            inside = [part for text in statements for part in wrap_code(text, width)]
            first = [head, f"{indent}{{"] if head.lstrip().startswith("__device__") else [f"{head} {{"]
            opened = [part for text in first for part in wrap_code(text, width)]
            return [*opened, *inside, f"{indent}}}{end}"]
    lines = []
    while len(line) > width:
        at = _find_break(line, width, len(line) - len(line.lstrip()))
        if at is None:
            break
        lines.append(line[:at].rstrip())
        line = further + line[at:].lstrip()
    return [*lines, line]


def _is_whole(text: str) -> bool:
    """Returns whether every bracket of the text is closed in it."""
    return all(text.count(opening) == text.count(closing) for opening, closing in ("()", "[]", "{}"))


def _find_break(line: str, width: int, start: int) -> int | None:
    """Returns where a line is best broken: outside of as many brackets as can be, and late. Not in a string.
    In the first third, which leaves little on the line, or behind its end only if there is no other place.
    """
    depth, quoted = 0, False
    places: list[tuple[bool, int, int, int]] = []
    near = line[: 3 * width]  # as far as places within the width look ahead: a line may be very long
    ranks = {match.start(): rank for rank, found in enumerate(_BREAKS) for match in found.finditer(near)}
    stops = [match.start() for match in _BRACKET.finditer(near)]
    for at in sorted([*ranks, *stops]):
        if at > width and places:
            break
        char = line[at]
        if char == '"' and line[at - 1] != "\\":
            quoted = not quoted
        if quoted:
            continue
        depth += (char in "([{") - (char in ")]}")
        if at in ranks and at > start:
            places.append((at <= start + (width - start) // 3, depth, ranks[at], -at))
    return -min(places)[3] if places else None
