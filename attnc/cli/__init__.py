"""The `attnc` command. Each group of subcommands has its file here; `main` is the only thing to call from
outside.

Exit codes: 0 fine, 1 findings (a wrong spec, a stale file, a failed check), 2 wrong usage, 3 a bug of
attnc's, 130 interrupted. A user's mistake never shows a traceback; a bug says so, and how to report it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

#: Commands that run kernels, in the simulator too, which may end a process.
_WITNESSED = ("demo", "fuzz", "verify")
#: Signals by which somebody ends a process who knows why.
_ASKED = ("SIGHUP", "SIGINT", "SIGPIPE", "SIGQUIT", "SIGTERM")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default the process's, and returns its exit code."""
    # The reference multiplies small matrices by the thousand; a thread pool costs each more than its work.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if argv is None and sys.argv[1:2] and sys.argv[1] in _WITNESSED:
        return _run_witnessed()
    return _run(argv)


def _run(argv: Sequence[str] | None = None) -> int:
    before = sys.unraisablehook
    sys.unraisablehook = partial(_interrupt_later, before)
    try:
        from attnc.cli.app import run_guarded

        return run_guarded(argv)
    except KeyboardInterrupt:  # before anything there could say so
        with suppress(OSError, AttributeError):  # closed by the caller
            sys.stderr.write("error: interrupted\n")
        return 128 + signal.SIGINT
    finally:
        sys.unraisablehook = before


#: Seconds after which an interrupt is raised again that came where nothing can be raised.
_MOMENT = 0.05


def _interrupt_later(
    before: Callable[[sys.UnraisableHookArgs], object], raised: sys.UnraisableHookArgs
) -> None:
    """Raises an interrupt again a moment later that came in a finaliser, or in the callback of a weak
    reference: Python would print it and go on. before: what hears of everything else.
    """
    if raised.exc_type is KeyboardInterrupt and hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, _MOMENT)
    else:
        before(raised)


def _run_and_leave() -> int:
    """Runs the command, and ends a process that has used a GPU without taking the interpreter apart: a thread
    of PyTorch's that lets go of a call's gradients meanwhile would abort it ("terminate called without an
    active exception").
    """
    code = _run()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return code
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by the caller, or its reader gone
            stream.flush()
    os._exit(code)


def _run_witnessed() -> int:
    from attnc.runtime.last_words import can_witness, run_witnessed

    found = run_witnessed(_run_and_leave) if can_witness() else _run()
    if isinstance(found, int):
        return found
    if found.signal in _ASKED:
        return 128 + signal.Signals[found.signal]  # as a shell says it
    from attnc.cli.console import complain

    doing = f" at a case of {found.doing}" if found.doing else ""
    again = f"{found.repro} runs the case again; " if found.repro else ""
    complain(
        f"{found.signal} ended the process{doing}",
        f"{again}SIGKILL is the system's as a rule, where memory runs out; others come of an access outside"
        " of all memory, a kernel's in the simulator or a compiler's",
    )
    return 1
