"""The table of subcommands, and what stands between them and their caller: exceptions become messages and
exit codes. What commands need is imported when they run, so that `attnc --help` stays quick.
"""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated

import typer

import attnc
from attnc.cli.bench import bench
from attnc.cli.compile import check, compile_
from attnc.cli.console import Mistake, complain, say, show_diagnostics
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
from attnc.diagnostics import DiagnosticError
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
    return "\n\n".join(" ".join(part.split()) for part in cleandoc(command.__doc__ or "").split("\n\n"))


app.command("new", rich_help_panel=_COMPILER, help=_flowing(new))(new)
app.command("compile", rich_help_panel=_COMPILER, help=_flowing(compile_))(compile_)
app.command("check", rich_help_panel=_COMPILER, help=_flowing(check))(check)
app.command("fmt", rich_help_panel=_COMPILER, help=_flowing(fmt))(fmt)
app.command("explain", rich_help_panel=_COMPILER, help=_flowing(explain))(explain)
app.command("import-flex", rich_help_panel=_COMPILER, help=_flowing(import_flex))(import_flex)
app.command("demo", rich_help_panel=_JUDGE, help=_flowing(demo))(demo)
app.command("verify", rich_help_panel=_JUDGE, help=_flowing(verify))(verify)
app.command("fuzz", rich_help_panel=_JUDGE, help=_flowing(fuzz))(fuzz)
app.command("bench", rich_help_panel=_SPEED, help=_flowing(bench))(bench)
app.command("calibrate", rich_help_panel=_SPEED, help=_flowing(calibrate))(calibrate)
app.command("tune", rich_help_panel=_SPEED, help=_flowing(tune))(tune)
app.command("export", rich_help_panel=_COMPILER, help=_flowing(export))(export)
app.command("lsp", rich_help_panel=_COMPILER, help=_flowing(lsp))(lsp)
app.command("doctor", rich_help_panel="Machine", help=_flowing(doctor))(doctor)


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
    except ImportError as failure:
        missing = import_mistake(failure)
        if missing is None:
            _report_bug(failure)
            return USAGE + 1
        complain(missing.message, missing.hint)
        return USAGE
    except Exception as failure:  # whatever is left is ours
        _report_bug(failure)
        return USAGE + 1
    return 0


def _reason(failure: OSError) -> str:
    what = failure.strerror.lower() if failure.strerror else str(failure)
    return f"{failure.filename}: {what}" if failure.filename else what


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
