"""A server that decodes through pages says of each token what its trainer says, bit for bit."""

from __future__ import annotations

import pytest
import torch

from examples import same_bits


@pytest.mark.nightly
@pytest.mark.parametrize("layers", ["1", pytest.param("2", marks=pytest.mark.nightly)])
def test_log_probabilities_of_server_and_trainer_have_the_same_bits(
    layers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert same_bits.main(["--length", "36", "--steps", "1", "--layers", layers]) == 0
    assert "trained again: the same bits" in capsys.readouterr().out


def test_other_bits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees a key that one of them lacks."""

    def attend_blind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        return same_bits.attend_whole(q, torch.cat([k[:, :1] * 1.01, k[:, 1:]], 1), v, layer)

    torch.manual_seed(0)
    model = same_bits.Model(1, 2, 1, 24)
    requests = [same_bits.Request(list(range(5)))]
    server = same_bits.Server(model, 4, torch.device("cpu"))
    server.generate(requests, 20)
    same, count = same_bits.compare(model, requests, torch.device("cpu"))
    assert same == count
    monkeypatch.setattr(
        same_bits,
        "forward_whole",
        lambda model, tokens: model(tokens, torch.arange(tokens.shape[1])[None], attend_blind),
    )
    same, count = same_bits.compare(model, requests, torch.device("cpu"))
    assert same < count
