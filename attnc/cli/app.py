"""The table of subcommands. What they need is imported when they run, so that `attnc --help` stays quick."""

from __future__ import annotations

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
from attnc.cli.fmt import fmt
from attnc.cli.fuzz import fuzz
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

app.command("compile", rich_help_panel=_COMPILER)(compile_)
app.command("check", rich_help_panel=_COMPILER)(check)
app.command("fmt", rich_help_panel=_COMPILER)(fmt)
app.command("explain", rich_help_panel=_COMPILER)(explain)
app.command("demo", rich_help_panel=_JUDGE)(demo)
app.command("verify", rich_help_panel=_JUDGE)(verify)
app.command("fuzz", rich_help_panel=_JUDGE)(fuzz)
app.command("bench", rich_help_panel=_SPEED)(bench)
app.command("calibrate", rich_help_panel=_SPEED)(calibrate)
app.command("tune", rich_help_panel=_SPEED)(tune)
app.command("doctor", rich_help_panel="Machine")(doctor)


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
