"""The table of subcommands, and what stands between them and their caller: exceptions become messages and
exit codes. What commands need is imported when they run, so that `attnc --help` stays quick.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

import attnc
from attnc.cli.bench import bench
from attnc.cli.compile import check, compile_
from attnc.cli.console import Mistake, complain, say, say_json, show_diagnostics, show_warning
from attnc.cli.demo import demo
from attnc.cli.doctor import doctor
from attnc.cli.explain import explain
from attnc.cli.export import export
from attnc.cli.fmt import fmt
from attnc.cli.import_flex import import_flex
from attnc.cli.lsp import lsp
from attnc.cli.new import new
from attnc.cli.packages import import_mistake
from attnc.cli.tune import calibrate, tune
from attnc.cli.verify import fuzz, verify
from attnc.diagnostics import DiagnosticError, to_json
from attnc.effort import lift_limits
from attnc.version import find_commit

app = typer.Typer(
    name="attnc",
    help="Compiles short .attn specs into readable attention kernels, verified against a float64 reference.",
    epilog="Start with: attnc demo",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_COMPILER = "Compiler"
_JUDGE = "Correctness"
_SPEED = "Speed"


def _flowing(command: Callable[..., None]) -> str:
    """Returns the docstring with a line for each paragraph: Typer keeps line breaks, but the screen has its
    own.
    """
    return "\n\n".join(
        " ".join(part.split()) for part in inspect.cleandoc(command.__doc__ or "").split("\n\n")
    )


_NO_LIMITS = Annotated[
    bool,
    typer.Option("--no-limits", help="Lift the limits on the size of a spec and on the work for it."),
]


def _with_homes(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with `~` as the home of the user in all paths: shells leave it in `--out=~/x`."""

    @wraps(command)
    def run(**options: Any) -> None:
        command(**{name: _from_home(value) for name, value in options.items()})

    return run


def _from_home(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_from_home, value)]
    if not isinstance(value, Path):
        return value
    from attnc.support.folders import named_path

    return named_path(value)


def _with_json(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with what is wrong with a spec as JSON on standard output, too, where JSON is
    wanted.
    """

    @wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except DiagnosticError as failure:
            if options.get("as_json"):
                say_json({"diagnostics": json.loads(to_json(failure.diagnostics))})
            raise

    return run


def _with_limits(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with the option that lifts the compiler's limits: a file has no say in them."""

    def run(*, is_unlimited: bool, **options: Any) -> None:
        with lift_limits() if is_unlimited else nullcontext():
            command(**options)

    own = inspect.signature(command, eval_str=True).parameters.values()
    option = inspect.Parameter(
        "is_unlimited", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_NO_LIMITS
    )
    run.__signature__ = inspect.Signature([*own, option])  # type: ignore[attr-defined]  # what Typer reads
    run.__annotations__ = {**{one.name: one.annotation for one in own}, option.name: _NO_LIMITS}
    return run


def _add(name: str, panel: str, command: Callable[..., None], *, reads_specs: bool = True) -> None:
    made = _with_homes(_with_limits(_with_json(command)) if reads_specs else command)
    app.command(name, rich_help_panel=panel, help=_flowing(command))(made)


_add("new", _COMPILER, new, reads_specs=False)
_add("compile", _COMPILER, compile_)
_add("check", _COMPILER, check)
_add("fmt", _COMPILER, fmt)
_add("explain", _COMPILER, explain)
_add("import-flex", _COMPILER, import_flex, reads_specs=False)
_add("demo", _JUDGE, demo, reads_specs=False)
_add("verify", _JUDGE, verify)
_add("fuzz", _JUDGE, fuzz)
_add("bench", _SPEED, bench)
_add("calibrate", _SPEED, calibrate)
_add("tune", _SPEED, tune)
_add("export", _COMPILER, export, reads_specs=False)
_add("lsp", _COMPILER, lsp, reads_specs=False)
_add("doctor", "Machine", doctor, reads_specs=False)


def _version(wanted: bool) -> None:
    if wanted:
        commit = find_commit()
        say(f"attnc {attnc.__version__}" + (f" ({commit})" if commit else ""))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and its commit.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Takes the options of the command itself."""


# --- exceptions become messages and exit codes --------------------------------------------------------------


FINDINGS = 1
USAGE = 2
INTERRUPTED = 130
CLOSED = 128 + signal.SIGPIPE


def run_guarded(argv: Sequence[str] | None = None) -> int:
    """Runs the app and returns its exit code, whatever happens."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, who does not want to read
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # until the end
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning  # where in attnc it was said helps nobody
            return _run(argv)
    except BrokenPipeError:
        # The reader has gone; the interpreter must not find out again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED


def _run(argv: Sequence[str] | None) -> int:
    try:
        app(args=None if argv is None else list(argv), prog_name="attnc")
    except SystemExit as exit_:
        if isinstance(exit_.__context__, BrokenPipeError):  # which Click takes for a failure
            return CLOSED
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
    except ImportError as failure:
        missing = import_mistake(failure)
        if missing is None:
            _report_bug(failure)
            return USAGE + 1
        complain(missing.message, missing.hint)
        return USAGE
    except Exception as failure:
        from attnc.runtime.memory import GpuLost, describe_lack, ran_out_of_memory

        if isinstance(failure, GpuLost):
            complain(failure.what, f"{_LOST}: {failure.repro}")
            return FINDINGS
        if ran_out_of_memory(failure):
            complain(describe_lack(failure), _ROOM)
            return USAGE
        _report_bug(failure)  # whatever is left is ours
        return USAGE + 1
    return 0


def _reason(failure: OSError) -> str:
    what = failure.strerror.lower() if failure.strerror else str(failure)
    return f"{failure.filename}: {what}" if failure.filename else what


#: What to do where memory ran out, of a GPU as a rule.
_ROOM = "end what else uses the memory, or choose another GPU with CUDA_VISIBLE_DEVICES"
#: What to do where a kernel has ended a process's work on a GPU.
_LOST = (
    "the GPU takes no more work from this process, so that no other case was run; this one again, which"
    " CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer in front tells more of"
)
#: What to do about a bug. The project has no address of its own: whoever gave you attnc has.
REPORT = (
    "keep the command line and the spec, and send both to where you have attnc from; CONTRIBUTING.md of its"
    " checkout says how to mend it"
)


def _report_bug(failure: Exception) -> None:
    if os.environ.get("ATTNC_DEBUG"):
        traceback.print_exception(failure)
    frame = traceback.extract_tb(failure.__traceback__)[-1]
    complain(
        f"this is a bug in attnc: {type(failure).__name__}: {failure} ({frame.name}, line {frame.lineno})",
        f"{REPORT}; ATTNC_DEBUG=1 shows the traceback"
        f" (attnc {attnc.__version__}, Python {platform.python_version()})",
    )
