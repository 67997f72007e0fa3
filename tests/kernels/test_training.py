"""The training example, shortened: on a CPU a generated kernel trains like PyTorch's attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attnc.runtime.loader import load_file

example: Any = load_file(Path(__file__).parents[2] / "examples" / "train_gpt.py")
TINY = example.Settings(
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    context=40,
    batch=2,
    steps=30,
    rate=4e-3,
    dtype="f32",
    device="cpu",
)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_generated_kernel_trains_like_that_of_torch() -> None:
    text = torch.tensor(list(b"softmax(q k^T / sqrt(d)) v, " * 400), dtype=torch.uint8)
    ours, theirs = (
        example.train(TINY, example.attention_of(kernel, TINY), 0, text) for kernel in ("attnc", "math")
    )
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
    assert ours.validation == pytest.approx(theirs.validation, abs=1e-5)
    assert theirs.losses[-1] < theirs.losses[0] - 0.5


def test_the_summary_says_how_far_curves_are_apart() -> None:
    curve = example.Curve
    curves = {
        "sdpa-flash": curve(losses=(2.0, 1.0), validation=1.0),
        "sdpa-math": curve(losses=(2.0, 1.5), validation=1.0),
        "attnc": curve(losses=(2.0, 2.0), validation=1.0),
        "attnc-again": curve(losses=(2.0, 2.0), validation=1.0),
        "sdpa-seed1": curve(losses=(3.0, 1.0), validation=1.0),
    }
    found = example.summary(curves)
    assert found == {"noise": 0.25, "attnc": 0.25, "seeds": 0.5, "again": 0.0}
