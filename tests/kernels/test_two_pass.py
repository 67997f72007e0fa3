"""Two passes over the keys: what the second adds up is what the first has counted."""

from __future__ import annotations

import pytest
import torch

from attnc.verify.case import Case
from attnc.verify.problem import build
from tests.targets import TARGETS, skip_without_compiler, small_tiles
from tests.verify.judging import spec, subject_of_text

LINES = (
    "input q: f16[B, M, H, 16]",
    "input k, v: f16[B, N, H, 16]",
    "input shift: i64[H]",
    "score = dot(q, k) + shift[h]",
    "normalize = softmax",
    "output o: f16[B, M, H, 16]",
    "output lse: f32[B, H, M]",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shift", [0, 3 * 10**8, -(10**9) - 7])
def test_weights_add_up_to_one_however_large_scores_are(target: str, shift: int) -> None:
    """Such scores are multiples of 32 in base 2, and so is the lse: exp2(score - lse) may be any power."""
    skip_without_compiler(target)
    made = subject_of_text(spec(LINES, f"softmax = two_pass, {small_tiles(target)}", target=target))
    case = Case(dims={"B": 1, "M": 5, "N": 50, "H": 2}, seed=1)
    inputs = build(made.variant.attention, case, device=made.device).inputs
    values = {**inputs, "v": torch.ones_like(torch.as_tensor(inputs["v"]))}
    values["shift"] = torch.full_like(torch.as_tensor(inputs["shift"]), shift)
    o, _ = made.function(*values.values())
    torch.testing.assert_close(o, torch.ones_like(o), atol=2**-10, rtol=0)  # of p in 16 bits
