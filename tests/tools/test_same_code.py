"""Machine code of a working tree beside that of a revision."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.verify.test_carry import NAME, write
from tools.same_code import main


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one generated module, in which the tool is called."""
    write(tmp_path / "generated")
    identity = ("-c", "user.name=n", "-c", "user.email=e")
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_other_names_are_the_same_code(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository / "generated", {"d64.cu": ("rows", "length")})
    assert main(["HEAD"]) == 0
    assert capsys.readouterr().out == "2 kernels compared; 0 modules differ\n"


def test_other_code_is_listed_with_registers(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository / "generated", {"d64.cu": ("* STAGES", "* 3")})
    assert main(["HEAD"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"{NAME}: other machine code: tiny"
    assert told[1].startswith("    tiny -DBLOCK_M=64 ")
    assert ": registers " in told[1]
    assert main(["HEAD", "no_such_module"]) == 0


def test_a_revision_that_is_not_there_is_told(repository: Path) -> None:
    with pytest.raises(SystemExit, match="git has no generated/ of 'no_such'"):
        main(["no_such"])
