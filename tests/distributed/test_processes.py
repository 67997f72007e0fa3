"""The engine on torch.distributed: two processes over gloo, by the command that people run."""

import json
from pathlib import Path

import pytest

from attnc.cli import main
from tests.distributed.specs import SPECS

pytestmark = pytest.mark.slow


def test_two_processes_agree_with_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.attn"
    path.write_text(SPECS["sink"], encoding="utf-8")
    assert main(["verify", str(path), "--ranks", "2", "--count", "2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["attention"], found["ranks"], found["ok"]) == ("small", 2, True)
    assert [row["ok"] for row in found["cases"]] == [True, True]
    assert 0 < found["worst"] < 1
