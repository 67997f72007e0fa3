"""The whole front end as one function, for tests of what it says."""

from collections.abc import Iterator
from pathlib import Path

from attnc.diagnostics import Diagnostic, DiagnosticError
from attnc.syntax.parser import load, parse

# The codes that the passes below can report. A new pass is a line in `_warnings` and its range here.
CODE_RANGES = ("E01", "E05")


def diagnose(path: Path) -> tuple[Diagnostic, ...]:
    """All that is reported about a spec: by the first pass that refuses it, else every warning."""
    try:
        return tuple(_warnings(path))
    except DiagnosticError as failure:
        return failure.diagnostics


def _warnings(path: Path) -> Iterator[Diagnostic]:
    """Runs every pass up to the plan."""
    parse(load(path))
    yield from ()
