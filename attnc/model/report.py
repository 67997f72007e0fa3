"""Where the passes of the model put what they find, so that one run tells the user everything."""

from __future__ import annotations

from typing import Unpack

from attnc.diagnostics import Details, Diagnostic, DiagnosticError, Label, error, warning
from attnc.source import Span

MAX_DIAGNOSTICS = 100


class Report:
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
        """Raise DiagnosticError with everything found, if any of it is an error."""
        if self.errors:
            raise DiagnosticError(self.in_source_order())
