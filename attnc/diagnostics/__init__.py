"""What the compiler tells its user: one structured error type, one registry of codes, one renderer.

Up to `plan`, everything that is wrong with a spec is a `Diagnostic` with a place in the text; anything else
that is raised is a bug in the compiler.
"""

from attnc.diagnostics.codes import CODES, CodeInfo
from attnc.diagnostics.diagnostic import (
    LIFT,
    MAX_DIAGNOSTICS,
    Details,
    Diagnostic,
    DiagnosticError,
    Label,
    Reporter,
    Severity,
    did_you_mean,
    error,
    render,
    suggest,
    to_json,
    warning,
)

__all__ = [
    "CODES",
    "LIFT",
    "MAX_DIAGNOSTICS",
    "CodeInfo",
    "Details",
    "Diagnostic",
    "DiagnosticError",
    "Label",
    "Reporter",
    "Severity",
    "did_you_mean",
    "error",
    "render",
    "suggest",
    "to_json",
    "warning",
]
