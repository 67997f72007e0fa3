"""The GPT trains on several ranks as on one. Processes take long to start: a test of the night."""

import pytest

from examples.train_gpt_ranks import main

pytestmark = pytest.mark.nightly


def test_losses_are_those_of_one_gpu() -> None:
    losses = main(["--cp", "2", "--dp", "2", "--steps", "4", "--tiny"])
    assert losses["shared"] == pytest.approx(losses["alone"], abs=1e-5)
