"""Files that measurements wrote: reading one, and which of two toolchains is newer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from attnc.diagnostics import DiagnosticError, error
from attnc.source import Source

Parsed = TypeVar("Parsed")


def read_measured(source: Source, form: int, parse: Callable[[Any], Parsed]) -> Parsed:
    """What `parse` makes of a JSON file that a measurement wrote in this format.

    Raises DiagnosticError (E0603) when it is not such a file.
    """
    try:
        data = json.loads(source.text)
        if data["format"] != form:
            raise ValueError(f"format {data['format']} is not {form}")
        return parse(data)
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        line = failure.lineno if isinstance(failure, json.JSONDecodeError) else 1
        start = source.line_start(line)
        span = source.span(start, start + len(source.line_text(line)))
        detail = f"no {failure}" if isinstance(failure, KeyError) else str(failure)
        hint = "delete it, or write it again with 'attnc tune'"
        message = "file of tuned choices that cannot be read"
        raise DiagnosticError([error("E0603", message, span, detail, hints=(hint,))]) from None


def version_of(toolchain: str) -> tuple[int, ...]:
    """The numbers in the name of a toolchain, to compare two of them by."""
    return tuple(int(part) for part in toolchain.replace(".", " ").split() if part.isdecimal())
