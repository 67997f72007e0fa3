"""The table of subcommands. What they need is imported when they run, so that `attnc --help` stays quick."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated

import typer

import attnc
from attnc.cli.bench import bench
from attnc.cli.calibrate import calibrate
from attnc.cli.compile import check, compile_
from attnc.cli.console import say
from attnc.cli.demo import demo
from attnc.cli.doctor import doctor
from attnc.cli.explain import explain
from attnc.cli.export import export
from attnc.cli.fmt import fmt
from attnc.cli.fuzz import fuzz
from attnc.cli.import_flex import import_flex
from attnc.cli.lsp import lsp
from attnc.cli.new import new
from attnc.cli.tune import tune
from attnc.cli.verify import verify

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
    """The docstring with a line for each paragraph: Typer keeps line breaks, but the screen has its own."""
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
        say(f"attnc {attnc.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself."""
