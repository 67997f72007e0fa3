"""NSA and MoBA are trained by kernels as by dense attention with the same blocks."""

from __future__ import annotations

import pytest
import torch

from examples import sparse_training
from examples.sparse_training import BLOCK, choose_by_means, take_best


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter, which all tests of this folder use, checks memory of the CPU alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.nightly
@pytest.mark.parametrize("run", ["nsa", "moba"])
def test_training_equals_dense_attention_with_the_same_blocks(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sparse_training.main(["--runs", run, "--steps", "1", "--length", "140"]) == 0
    assert f"{run}: loss" in capsys.readouterr().out


WITHOUT_TRAINING = ("--runs", "moba", "--steps", "0", "--length", "140")


def test_outputs_and_gradients_equal_those_of_dense_attention() -> None:
    assert sparse_training.main(WITHOUT_TRAINING) == 0


@pytest.mark.nightly
def test_other_blocks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees a block that the dense attention lacks."""
    dense = sparse_training.attend_densely

    def attend_less(
        name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return dense(name, q, k, v, None if blocks is None else blocks[..., :1])

    monkeypatch.setattr(sparse_training, "attend_densely", attend_less)
    assert sparse_training.main(WITHOUT_TRAINING) == 1


def test_the_best_blocks_come_with_the_first_and_the_own_one() -> None:
    scores = torch.tensor([[0.0, 1.0, 5.0, 2.0, 8.0]]).expand(1, 5 * BLOCK, 1, 5).clone()
    scores[..., 0] = -9.0
    chosen = take_best(scores)[0, ::BLOCK, 0].sort(-1).values.tolist()
    assert chosen == [[-1, -1, 0], [-1, 0, 1], [0, 1, 2], [0, 2, 3], [0, 2, 4]]


def test_blocks_are_chosen_by_mean_keys() -> None:
    """Of the last, shorter block too; none lies behind its query."""
    k = torch.zeros(1, 2 * BLOCK + 5, 1, 4)
    k[:, 2 * BLOCK :] = 1.0
    q = torch.ones(1, 3 * BLOCK - 1, 1, 4)[:, : k.shape[1]]
    chosen = choose_by_means(q, k)[0, :, 0]
    assert chosen[0].tolist() == [0, -1, -1]
    assert set(chosen[-1].tolist()) == {0, 1, 2}
    assert chosen[-1][0] == 2
