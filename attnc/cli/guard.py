"""What stands between a command and its caller: exceptions become messages and exit codes."""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import attnc
from attnc.cli.app import app
from attnc.cli.console import Mistake, complain, show_diagnostics
from attnc.diagnostics import DiagnosticError

FINDINGS = 1
USAGE = 2
INTERRUPTED = 130


def guarded(argv: Sequence[str] | None = None) -> int:
    """Runs the app and returns its exit code, whatever happens."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, who does not want to read
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # until the end
    try:
        return _run(argv)
    except BrokenPipeError:
        # The reader has gone; the interpreter must not find out again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINDINGS


def _run(argv: Sequence[str] | None) -> int:
    try:
        app(args=None if argv is None else list(argv), prog_name="attnc")
    except SystemExit as exit_:
        sys.stdout.flush()
        if exit_.code == INTERRUPTED:
            complain("interrupted")
        return exit_.code if isinstance(exit_.code, int) else FINDINGS
    except DiagnosticError as failure:
        show_diagnostics(failure.diagnostics)
        return FINDINGS
    except Mistake as mistake:
        complain(mistake.message, mistake.hint)
        return USAGE
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as failure:
        complain(_reason(failure))
        return USAGE
    except Exception as failure:  # whatever is left is ours
        _report_bug(failure)
        return USAGE + 1
    return 0


def _reason(failure: OSError) -> str:
    what = failure.strerror.lower() if failure.strerror else str(failure)
    return f"{failure.filename}: {what}" if failure.filename else what


def _report_bug(failure: Exception) -> None:
    if os.environ.get("ATTNC_DEBUG"):
        traceback.print_exception(failure)
    frame = traceback.extract_tb(failure.__traceback__)[-1]
    complain(
        f"this is a bug in attnc: {type(failure).__name__}: {failure} ({frame.name}, line {frame.lineno})",
        "please report it with the command line and the spec; ATTNC_DEBUG=1 shows the traceback"
        f" (attnc {attnc.__version__}, Python {platform.python_version()})",
    )
