"""The structured form of a message to the user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

from attnc.diagnostics.codes import CODES
from attnc.source import Span

Severity = Literal["error", "warning", "note"]


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
    """A diagnostic of severity 'error', from its usual parts."""
    return _diagnostic("error", code, message, Label(span, label), details)


def warning(code: str, message: str, span: Span, label: str = "", **details: Unpack[Details]) -> Diagnostic:
    """A diagnostic of severity 'warning', from its usual parts."""
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
