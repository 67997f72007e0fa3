"""The engine on torch.distributed: two processes over gloo."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from attnc.cli import main
from attnc.distributed import ContextParallel
from attnc.distributed.group import on_processes
from tests.distributed.specs import SPECS


@pytest.mark.slow
def test_two_processes_agree_with_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command that people run, of a spec whose element type is a param."""
    path = tmp_path / "small.attn"
    path.write_text(SPECS["types"], encoding="utf-8")
    assert main(["verify", str(path), "--ranks", "2", "--count", "2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["attention"], found["ranks"], found["ok"]) == ("small", 2, True)
    assert [row["ok"] for row in found["cases"]] == [True, True]
    assert 0 < found["worst"] < 1


@pytest.mark.nightly
def test_a_rank_that_dies_is_an_error_on_the_other(tmp_path: Path) -> None:
    """And no wait without end."""
    path = tmp_path / "error.txt"
    on_processes(2, _one_dies, str(path), seconds=30.0, deadline=300.0)
    assert path.read_text(encoding="utf-8").startswith("RuntimeError: ")


def _one_dies(rank: int, path: str) -> None:
    cp = ContextParallel(SPECS["causal"])
    shards = cp.shard(*(torch.ones(1, 32, heads, 16) for heads in (2, 1, 1)))
    with torch.no_grad():
        cp(*shards)
        if rank == 1:
            os._exit(0)
        try:
            cp(*shards)
        except RuntimeError as failure:
            Path(path).write_text(f"{type(failure).__name__}: {failure}", encoding="utf-8")
            os._exit(0)  # the group cannot be left in good order


def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that were set to nothing too; processes get what is meant where there is none."""
    monkeypatch.setattr(sys.modules["torch.multiprocessing.spawn"], "spawn", Mock())
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "")
    monkeypatch.delenv("NVSHMEM_DISABLE_NVLS", raising=False)
    before = dict(os.environ)
    on_processes(1, _one_dies)
    assert dict(os.environ) == before
