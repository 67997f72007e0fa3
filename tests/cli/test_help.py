"""Help texts teach: every command has one, with an example that works as written."""

import re

import pytest
from typer.main import get_command

from attnc.cli.app import app
from attnc.version import __version__
from tests.cli.conftest import Run

COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]  # an app with commands is a group


def test_the_commands() -> None:
    assert {"bench", "check", "compile", "demo", "doctor", "explain", "fmt", "tune"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example(run: Run, name: str) -> None:
    done = run(name, "--help")
    assert done.code == 0
    assert re.search(rf"Example: attnc {name}\b", done.out)


def test_version(run: Run) -> None:
    assert run("--version").out.startswith(f"attnc {__version__}")


def test_no_arguments_show_help(run: Run) -> None:
    assert "compile" in run().out


def test_nothing_is_coloured_without_a_terminal(run: Run) -> None:
    for arguments in (("compile",), ("check", "missing.attn"), ("--help",)):
        done = run(*arguments)
        assert "\x1b" not in done.out + done.err
