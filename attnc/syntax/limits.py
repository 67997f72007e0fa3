"""Limits that keep hostile specs cheap: nothing behind them needs to think about size or recursion.

They are checked on the text, token by token, before anything is parsed. The depth of a tree can exceed that
of its brackets (`a + a + a` leans left, one level for each operator), so attnc/syntax/build.py checks it once
more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from attnc.diagnostics import Diagnostic, error
from attnc.effort import spend
from attnc.source import Source, Span

MAX_CHARACTERS = 256 * 1024
#: Of lines, and of words, numbers and signs outside comments.
MAX_TOKENS = 16 * 1024
MAX_DEPTH = 64
MAX_DIGITS = 32
MAX_NAME = 64
_STEPS_PER_TOKEN = 15

_TOKEN = re.compile(
    r"(?P<comment>\#[^\n]*) | (?P<open>[(\[{]) | (?P<close>[)\]}]) | (?P<sign>- | not\b)"
    r" | (?P<name>[A-Za-z_][A-Za-z0-9_]*) | (?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?) | [^\s]",
    re.VERBOSE,
)


def check_size(source: Source) -> Diagnostic | None:
    """E0501, or None. Counts what reading the file costs."""
    if len(source.text) > MAX_CHARACTERS:
        message = f"the file has {len(source.text)} characters; the limit is {MAX_CHARACTERS}"
        return error("E0501", message, source.span(0, 0), "too large to be a spec")
    tokens = sum(match.lastgroup != "comment" for match in _TOKEN.finditer(source.text))
    for count, what in ((source.text.count("\n"), "lines"), (tokens, "words, numbers and signs")):
        if count > MAX_TOKENS:
            message = f"the file has {count} {what}; the limit is {MAX_TOKENS}"
            return error("E0501", message, source.span(0, 0), "too large to be a spec")
    spend(_STEPS_PER_TOKEN * tokens)
    return None


def check_limits(source: Source, start: int, end: int) -> Diagnostic | None:
    """The first place in [start, end) that exceeds a limit, or None."""
    return next(_violations(source, start, end), None)


def too_deep(span: Span) -> Diagnostic:
    hint = "give parts of the expression a name with 'let' or 'def'"
    return error("E0502", f"more than {MAX_DEPTH} levels of nesting", span, "too deep", hints=[hint])


def _violations(source: Source, start: int, end: int) -> Iterator[Diagnostic]:
    depth = signs = 0
    for match in _TOKEN.finditer(source.text, start, end):
        kind, length = match.lastgroup, match.end() - match.start()
        span = source.span(match.start(), match.end())
        signs = signs + 1 if kind == "sign" else 0
        depth += (kind == "open") - (kind == "close" and depth > 0)
        if depth + signs > MAX_DEPTH:
            yield too_deep(span)
        elif kind == "name" and length > MAX_NAME:
            yield error("E0504", f"name of {length} characters", span, f"the limit is {MAX_NAME}")
        elif kind == "number" and (digits := sum(map(str.isdigit, match.group()))) > MAX_DIGITS:
            yield error("E0503", f"number of {digits} digits", span, f"the limit is {MAX_DIGITS}")
        elif kind == "number" and not math.isfinite(float(match.group())):
            yield error("E0505", f"'{span.text}' is too large", span, "not a finite float64")
