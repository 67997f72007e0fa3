"""What a user is told whose spec is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attnc.diagnostics import Diagnostic, DiagnosticError


def refused(make: Callable[..., object], *arguments: Any, **options: Any) -> Diagnostic:
    """Returns the one diagnostic that a call raises."""
    with pytest.raises(DiagnosticError) as caught:
        make(*arguments, **options)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def refusal(make: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Returns its code and message, and what stands at the span."""
    found = refused(make, *arguments, **options)
    return f"{found.code} {found.message}: {found.primary.text}"
