"""Messages to the user: their structure, 'did you mean', their text for people and JSON for programs, and the
`Reporter` that collects the findings of all passes, so that one run reports everything.

The text quotes the spec as an editor shows it: tabs stop every four columns, wide characters take two,
and characters that could steer a terminal (controls, direction marks) are shown by their numbers, because
a spec may come from anywhere.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

from attnc.diagnostics.codes import CODES
from attnc.source import Source, Span, visible

Severity = Literal["error", "warning", "note"]
#: The hint of every limit on size and work.
LIFT = "--no-limits lifts the limit"


@dataclass(frozen=True, slots=True)
class Label:
    """A place in a spec and what to say below it (possibly nothing)."""

    span: Span
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One thing to tell the user.

    `message` is a line without a full stop, `primary` the place to look at, `related` other places that
    explain it, `notes` facts, `hints` what to write instead. Raises KeyError for a code that is not in
    `CODES`.
    """

    code: str
    message: str
    primary: Label
    related: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    severity: Severity = "error"

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise KeyError(f"diagnostic code {self.code} is not in the registry")
        if (self.code[0] == "E") != (self.severity == "error"):
            raise ValueError(f"a diagnostic {self.code} cannot have severity {self.severity!r}")


class DiagnosticError(Exception):
    """The spec is wrong. Carries the diagnostics of the pass that raised it, in order; at least one."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        if not self.diagnostics:
            raise ValueError("a DiagnosticError needs a diagnostic")
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return "\n".join(f"{d.primary.span}: {d.severity}[{d.code}]: {d.message}" for d in self.diagnostics)


class Details(TypedDict, total=False):
    """What `error` and `warning` take beside the message and its place; see `Diagnostic`."""

    related: Iterable[Label]
    notes: Iterable[str]
    hints: Iterable[str]


def error(code: str, message: str, span: Span, label: str = "", **details: Unpack[Details]) -> Diagnostic:
    """Returns a diagnostic of severity 'error', from its usual parts."""
    return _diagnostic("error", code, message, Label(span, label), details)


def warning(code: str, message: str, span: Span, label: str = "", **details: Unpack[Details]) -> Diagnostic:
    """Returns a diagnostic of severity 'warning', from its usual parts."""
    return _diagnostic("warning", code, message, Label(span, label), details)


def _diagnostic(severity: Severity, code: str, message: str, primary: Label, details: Details) -> Diagnostic:
    return Diagnostic(
        code=code,
        message=message,
        primary=primary,
        related=tuple(details.get("related", ())),
        notes=tuple(details.get("notes", ())),
        hints=tuple(details.get("hints", ())),
        severity=severity,
    )


# --- 'did you mean'


def suggest(name: str, candidates: Iterable[str]) -> str | None:
    """Returns the closest candidate, if it is close enough; among equals one that the name begins, then the
    first by name.

    Close is one edit for every three letters, and at least one for names of three letters or more. A
    transposition counts as one edit, a difference in case as none: 'kv_dix' finds 'kv_idx', 'd' finds 'D',
    'tile.k' finds 'tile.kv', 'x' does not find 'q'.
    """
    ranked = sorted(
        (_distance(name.lower(), candidate.lower()), not candidate.startswith(name), candidate)
        for candidate in set(candidates)
    )
    return next((candidate for distance, _, candidate in ranked if distance <= len(name) // 3), None)


def did_you_mean(name: str, candidates: Iterable[str]) -> tuple[str, ...]:
    """Returns the hints of a diagnostic about an unknown name: none, or one."""
    found = suggest(name, candidates)
    return (f"did you mean '{found}'?",) if found is not None else ()


def _distance(a: str, b: str) -> int:
    """Returns the edit distance with transpositions of neighbours (optimal string alignment)."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


# --- as text and as JSON


_TAB = 4
_WIDTH = 160
_MARGIN = 40
_COLORS = {"error": "1;31", "warning": "1;33", "note": "1;36", "gutter": "34", "bold": "1", "off": ""}


def render(diagnostics: Iterable[Diagnostic], color: bool = False) -> str:
    """Returns the diagnostics as text, one below the other, each line ended; `color` adds ANSI sequences."""
    return "".join(f"{line.rstrip()}\n" for d in diagnostics for line in _Renderer(d, color).lines())


def to_json(diagnostics: Iterable[Diagnostic]) -> str:
    """Returns a JSON array with an object for each diagnostic; lines and columns count from 1, ends are
    exclusive.
    """
    return json.dumps([_as_dict(d) for d in diagnostics], indent=2)


def _as_dict(d: Diagnostic) -> dict[str, object]:
    return {
        "code": d.code,
        "severity": d.severity,
        "message": d.message,
        "primary": _label_as_dict(d.primary),
        "related": [_label_as_dict(label) for label in d.related],
        "notes": list(d.notes),
        "hints": list(d.hints),
    }


def _label_as_dict(label: Label) -> dict[str, object]:
    source = label.span.source
    line, column = source.position(label.span.start)
    end_line, end_column = source.position(label.span.end)
    return {
        "path": source.path,
        "line": line,
        "column": column,
        "end_line": end_line,
        "end_column": end_column,
        "label": label.text,
    }


@dataclass(frozen=True, slots=True)
class _Mark:
    """An underline below one line: columns [start, end) in characters, from 0."""

    line: int
    start: int
    end: int
    sign: str
    text: str


class _Renderer:
    def __init__(self, diagnostic: Diagnostic, color: bool) -> None:
        self.diagnostic = diagnostic
        self.color = color
        labels = (diagnostic.primary, *diagnostic.related)
        self.width = max(2, *(len(str(label.span.end_line)) for label in labels))

    def paint(self, text: str, style: str) -> str:
        code = _COLORS[style]
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and code else text

    def lines(self) -> Iterator[str]:
        d = self.diagnostic
        yield self.paint(f"{d.severity}[{d.code}]", d.severity) + self.paint(
            f": {visible(d.message)}", "bold"
        )
        marks: dict[Source, list[_Mark]] = {d.primary.span.source: _marks(d.primary, "^")}
        for label in d.related:
            marks.setdefault(label.span.source, []).extend(_marks(label, "-"))
        for source, own in marks.items():
            yield from self.snippet(source, own)
        for kind, texts in (("note", d.notes), ("help", d.hints)):
            for text in texts:
                yield (
                    self.paint(f"{'':{self.width}} = ", "gutter")
                    + self.paint(f"{kind}:", "bold")
                    + f" {visible(text)}"
                )

    def snippet(self, source: Source, marks: list[_Mark]) -> Iterator[str]:
        place = marks[0]
        arrow = "-->" if source is self.diagnostic.primary.span.source else ":::"
        yield self.paint(f"{'':{self.width}}{arrow} ", "gutter") + visible(
            f"{source.path}:{place.line}:{place.start + 1}"
        )
        last = None
        for line in sorted({mark.line for mark in marks}):
            if last is not None and line > last + 1:
                yield self.paint("...", "gutter")
            last = line
            yield from self.quote(
                source, line, sorted((m for m in marks if m.line == line), key=lambda m: m.start)
            )

    def quote(self, source: Source, line: int, marks: list[_Mark]) -> Iterator[str]:
        text, offsets = _display(source.line_text(line))
        lo, hi = _crop(
            len(offsets) and offsets[-1], [offsets[m.start] for m in marks], [offsets[m.end] for m in marks]
        )
        before, after = "…" * (lo > 0), "…" * (hi < offsets[-1])
        yield self.paint(f"{line:>{self.width}} |", "gutter") + f" {before}{_columns(text, lo, hi)}{after}"
        for mark in marks:
            start, end = (min(max(offsets[i], lo), hi) - lo + len(before) for i in (mark.start, mark.end))
            style = self.diagnostic.severity if mark.sign == "^" else "gutter"
            underline = mark.sign * max(1, end - start) + (f" {visible(mark.text)}" if mark.text else "")
            yield (
                self.paint(f"{'':{self.width}} |", "gutter")
                + " " * (start + 1)
                + self.paint(underline, style)
            )


def _marks(label: Label, sign: str) -> list[_Mark]:
    """Returns an underline for a span on one line; for a longer one two, below its first and its
    last line.
    """
    span = label.span
    source, first, last = span.source, span.line, span.end_line
    start = span.start - source.line_start(first)
    if first == last:
        return [_Mark(first, start, _end(span, first), sign, label.text)]
    text = source.line_text(last)
    indent = len(text) - len(text.lstrip())
    head = _Mark(first, start, len(source.line_text(first)), sign, "")
    return [head, _Mark(last, indent, max(indent, _end(span, last)), sign, label.text)]


def _end(span: Span, line: int) -> int:
    return min(span.end - span.source.line_start(line), len(span.source.line_text(line)))


def _display(line: str) -> tuple[list[str], list[int]]:
    shown: list[str] = []
    offsets = [0]
    for char in line:
        shown.append(" " * (_TAB - offsets[-1] % _TAB) if char == "\t" else visible(char))
        offsets.append(offsets[-1] + sum(map(_char_width, shown[-1])))
    offsets.append(offsets[-1])  # the place of a span that starts at the line ending
    return shown, offsets


def _columns(shown: list[str], lo: int, hi: int) -> str:
    """Returns the display columns [lo, hi); a wide character cut in two becomes a blank."""
    out: list[str] = []
    column = 0
    for text in shown:
        width = sum(map(_char_width, text))
        inside = min(column + width, hi) - max(column, lo)
        if lo <= column and column + width <= hi:
            out.append(text)
        elif inside > 0:
            out.append(" " * inside)
        column += width
    return "".join(out)


def _crop(width: int, starts: list[int], ends: list[int]) -> tuple[int, int]:
    if width <= _WIDTH:
        return 0, width
    lo = 0 if max(ends) <= _WIDTH else max(0, min(starts) - _MARGIN)
    return lo, min(width, lo + _WIDTH)


def _char_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


# --- of all passes


MAX_DIAGNOSTICS = 100


class Reporter:
    """The diagnostics of one `resolve`, in the order in which they were found.

    Nobody reads more than MAX_DIAGNOSTICS, and a hostile file could make millions: that many errors raise
    DiagnosticError at once, and further warnings are dropped.
    """

    def __init__(self) -> None:
        self.diagnostics: list[Diagnostic] = []
        #: How many of them are errors.
        self.errors = 0
        self._said: set[tuple[str, Label]] = set()

    def error(self, code: str, message: str, span: Span, label: str = "", **details: Unpack[Details]) -> None:
        self.add(error(code, message, span, label, **details))

    def warning(
        self, code: str, message: str, span: Span, label: str = "", **details: Unpack[Details]
    ) -> None:
        self.add(warning(code, message, span, label, **details))

    def add(self, diagnostic: Diagnostic) -> None:
        """Keeps a diagnostic, unless the same was said of the same place: `input k, v` is one mistake."""
        said = (diagnostic.code, diagnostic.primary)
        is_full = len(self.diagnostics) >= MAX_DIAGNOSTICS
        if said in self._said or (is_full and diagnostic.severity != "error"):
            return
        self._said.add(said)
        self.diagnostics.append(diagnostic)
        self.errors += diagnostic.severity == "error"
        if self.errors >= MAX_DIAGNOSTICS:
            raise DiagnosticError(self.in_source_order())

    def in_source_order(self) -> tuple[Diagnostic, ...]:
        return tuple(
            sorted(self.diagnostics, key=lambda d: (d.primary.span.source.path, d.primary.span.start))
        )

    def raise_errors(self) -> None:
        """Raises DiagnosticError with everything found, if any of it is an error."""
        if self.errors:
            raise DiagnosticError(self.in_source_order())
