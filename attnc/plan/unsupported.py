"""The diagnostic of what the language has and a target's kernels have not."""

from __future__ import annotations

from attnc.diagnostics import Diagnostic, error
from attnc.source import Span


def unsupported(message: str, span: Span | None, label: str, *hints: str) -> Diagnostic:
    """E0602, at the knob or statement that asks for it; ValueError where the spec has no such place."""
    if span is None:
        raise ValueError(f"no span for: {message}")
    return error("E0602", message, span, label, hints=hints)
