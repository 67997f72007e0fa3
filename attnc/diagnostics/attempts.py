"""Several ways to make one thing, of which the first that is not refused is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from attnc.diagnostics import DiagnosticError

Made = TypeVar("Made")


def first_made(choices: Sequence[str], make: Callable[[str], Made]) -> tuple[Made, DiagnosticError | None]:
    """Returns what is made for the first target (or by the first schedules) that has kernels for it, and why
    the first of all has none. Raises what the last says.
    """
    failures: list[DiagnosticError] = []
    for choice in choices[:-1]:
        try:
            return make(choice), next(iter(failures), None)
        except DiagnosticError as failure:
            failures.append(failure)
    return make(choices[-1]), next(iter(failures), None)
