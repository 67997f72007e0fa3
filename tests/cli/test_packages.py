"""Packages that are not there: what is missing is named, with what to do, and is no bug of attnc's."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from attnc.cli.packages import import_mistake, install
from tests.cli.conftest import Done, Run
from tests.processes import run_program

HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec

def found(cls, name, *rest):
    return None if name.partition(".")[0] == "triton" else find(name, *rest)

PathFinder.find_spec = classmethod(found)

from importlib import metadata
version = metadata.version
def shown(name):
    if name == "triton":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = shown
"""
COMMAND = """
import sys
from attnc.cli import main
sys.exit(main())
"""


@pytest.fixture
def without_triton(folder: Path) -> Run:
    """Runs the command in a process that has no Triton, in the folder."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def command(*arguments: str) -> Done:
        done = run_program(HIDE + COMMAND, *arguments, environment=environment)
        return Done(done.returncode, done.stdout, done.stderr)

    return command


@pytest.mark.parametrize("command", [("verify", "--count", "1"), ("fuzz", "--examples", "1"), ("demo",)])
def test_without_triton_its_kernels_are_not_run_and_the_rest_is_named(
    without_triton: Run, command: tuple[str, ...]
) -> None:
    done = without_triton(command[0], "specs/tiny.attn", *command[1:])
    assert done.code == 2
    assert "error: the command needs 'triton', which is not installed\n" in done.err
    assert "pip install triton; without it 'attnc check', 'compile' and 'explain'" in done.err
    assert "bug" not in done.err


def test_without_triton_the_rest_works(without_triton: Run, folder: Path) -> None:
    path = folder / "specs" / "tiny.attn"
    path.write_text(path.read_text().replace("for triton", "for cuda.sm_80"))
    for command in (("check",), ("compile",), ("explain", "specs/tiny.attn")):
        assert without_triton(*command).code == 0
    done = without_triton("doctor")
    assert done.code == (1 if platform.system() == "Linux" else 0)
    assert "bug" not in done.err
    assert "needs triton; 'attnc check'" in done.out
    assert "reinstall triton" not in done.out
    path.write_text(path.read_text().replace("T in {f16, bf16}, W in {16, 32}", "T in {f16}, W in {16}"))
    assert without_triton("verify", "specs/tiny.attn", "--count", "1").code == 0


def test_where_pypi_has_no_triton_nobody_is_sent_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert install("triton").startswith("PyPI has no triton for Darwin: 'attnc check'")
    assert install("torch") == "pip install torch"


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ModuleNotFoundError("x", name="cupy.cuda"), "the command needs 'cupy', which is not installed"),
        (ImportError("torn", name="numpy"), "'numpy' cannot be imported: torn"),
        (
            ModuleNotFoundError("x", name="fcntl"),
            "this Python has no module 'fcntl', which the command needs",
        ),
        (ImportError("x", name="attnc.cli"), None),
        (ImportError("x"), None),
    ],
)
def test_what_is_missing_is_named(failure: ImportError, message: str | None) -> None:
    found = import_mistake(failure)
    assert (found and found.message) == message
