"""The GPT trains on several ranks as on one, and goes on where it was. Processes take long to start: tests of
the night.
"""

import shutil
from pathlib import Path

import pytest

from examples.train_gpt_ranks import Checkpoints, main

pytestmark = pytest.mark.nightly


def test_losses_are_those_of_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    losses = main(["--cp", "2", "--dp", "2", "--steps", "4", "--tiny", "--context", "48", "--batch", "4"])
    assert losses["shared"] == pytest.approx(losses["alone"], abs=1e-5)
    assert "efficiency" in capsys.readouterr().out


def test_a_checkpoint_resumes_with_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit by bit: from weights and the optimizer's state as they were, in new processes."""
    kept = Checkpoints(tmp_path, every=2)
    arguments = ["--cp", "2", "--dp", "1", "--steps", "4", "--tiny", "--checkpoints", str(tmp_path)]
    whole = main([*arguments, "--every", "2"])["shared"]
    assert (len(whole), kept.newest) == (4, 4)
    shutil.rmtree(tmp_path / "4")
    (tmp_path / "4").mkdir()  # as one that was cut off leaves it
    assert kept.newest == 2
    assert main([*arguments, "--every", "2"])["shared"] == whole[2:]
    assert main([*arguments, "--every", "2"])["shared"] == []
    assert "all 4 steps are behind the checkpoint" in capsys.readouterr().out
