"""The one road from a spec's text, and from the names of files, paths and devices, to generated text.

What `comment` gives is inert wherever a template puts it: in a comment or a docstring of Python, in a comment
of C++. What `literal` gives is a string of Python with that value. Everything else in generated text is
printed from trees (`printer`), whose names are identifiers and whose numbers are numbers.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Literal

from attnc.source import Span, join_lines, visible

_WIDTH = 100
#: What means something inside comments or docstrings of a target or in a template, as far as it is printable:
#: backslashes, quotes that end a docstring, trigraphs, `/*`, `*/` and `{{`.
_ACTIVE = re.compile(r'[\\"]|\?(?=\?)|(?<=\?)\?|\*(?=/)|(?<=/)\*|\{(?=[{%#])|(?<=\{)[{%#]|\[(?=\[)|(?<=\[)\[')
#: What a literal escapes. The passes over generated lines (`layout`) know no strings, so that brackets,
#: commas, '#' and runs of blanks would be code to them.
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_./: -]|(?<= ) ")


def comment(text: str, width: int | None = None) -> str:
    """Returns any text as one line that is inert in comments and docstrings of every target, cut to the
    width, behind a word if there is one in its second half.
    """
    line = _ACTIVE.sub(lambda match: f"<U+{ord(match.group()):04X}>", visible(text.replace("\n", " ")))
    if width is None or len(line) <= width:
        return line
    words, blank, _ = line[: width - 3].rpartition(" ")
    return f"{words} ..." if blank and len(words) > width // 2 else f"{line[: width - 3]}..."


def literal(text: str) -> str:
    """Returns any text as a string of Python, in double quotes and with escapes."""
    return f'"{_NOT_PLAIN.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def command(path: str) -> str:
    """Returns `attnc compile PATH` as one types it, as a comment."""
    return comment(f"attnc compile {shlex.quote(path)}")


def expression(span: Span) -> str:
    """Returns what a span of a spec says, as a comment."""
    return comment(join_lines(span.text), _WIDTH)


def statement(span: Span) -> str:
    """Returns the statement that a span is part of, whole and as one line."""
    return comment(join_lines(span.source.statement(span.start).text))


def quote(span: Span | None, otherwise: str = "") -> str:
    """Returns `spec.attn:6 mask = causal`: the statement that a piece of kernel follows from, as a
    comment.
    """
    if span is None:
        return otherwise
    whole = span.source.statement(span.start)
    place = f"{Path(span.source.path).name}:{whole.line}"
    return f"{comment(place)}  {comment(join_lines(whole.text), _WIDTH)}"


def without_comments(text: str, start: Literal["#", "//"]) -> str:
    """Returns generated text without its comments: what a pass reads that asks what the code mentions."""
    *lines, last = text.split("\n")
    kept = [line for line in lines if start not in line or not line.lstrip(" \t").startswith(start)]
    return "\n".join(
        [line.partition(start)[0].rstrip(" \t") if start in line else line for line in (*kept, last)]
    )
