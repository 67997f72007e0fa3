"""Several ways to make one thing, of which the first that is not refused is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from attnc.diagnostics import DiagnosticError

Made = TypeVar("Made")


def first_made(choices: Sequence[str], make: Callable[[str], Made]) -> tuple[Made, DiagnosticError | None]:
    """Returns the result of the first choice (a target, or schedules) that has kernels, and the failure of
    the first choice, None if that had some. Raises the failure of the last choice if none has.
    """
    failures: list[DiagnosticError] = []
    for choice in choices[:-1]:
        try:
            return make(choice), next(iter(failures), None)
        except DiagnosticError as failure:
            failures.append(failure)
    return make(choices[-1]), next(iter(failures), None)
