"""Where the passes of the model put what they find, so that one run tells the user everything."""

from __future__ import annotations

from collections.abc import Iterable

from attnc.diagnostics import Diagnostic, DiagnosticError, Label, error, warning
from attnc.source import Span

MAX_DIAGNOSTICS = 100


class Report:
    """The diagnostics of one `resolve`, in the order in which they were found.

    Raises DiagnosticError as soon as there are MAX_DIAGNOSTICS of them: nobody reads more, and a hostile file
    could make millions.
    """

    def __init__(self) -> None:
        self.diagnostics: list[Diagnostic] = []

    def error(
        self,
        code: str,
        message: str,
        span: Span,
        label: str = "",
        *,
        related: Iterable[Label] = (),
        notes: Iterable[str] = (),
        hints: Iterable[str] = (),
    ) -> None:
        self.add(error(code, message, span, label, related=related, notes=notes, hints=hints))

    def warning(
        self, code: str, message: str, span: Span, label: str = "", *, hints: Iterable[str] = ()
    ) -> None:
        self.add(warning(code, message, span, label, hints=hints))

    def add(self, diagnostic: Diagnostic) -> None:
        """Keeps a diagnostic unless the same was said of the same place.

        `input k, v: ...` has one mistake, not two.
        """
        said = (diagnostic.code, diagnostic.primary)
        if any((other.code, other.primary) == said for other in self.diagnostics):
            return
        self.diagnostics.append(diagnostic)
        if len(self.diagnostics) >= MAX_DIAGNOSTICS:
            raise DiagnosticError(self.in_source_order())

    @property
    def errors(self) -> int:
        """How many errors there are so far."""
        return sum(d.severity == "error" for d in self.diagnostics)

    def in_source_order(self) -> tuple[Diagnostic, ...]:
        return tuple(
            sorted(self.diagnostics, key=lambda d: (d.primary.span.source.path, d.primary.span.start))
        )

    def raise_errors(self) -> None:
        """Raise DiagnosticError with everything found, if any of it is an error."""
        if self.errors:
            raise DiagnosticError(self.in_source_order())
