"""Constants that float32 holds as other numbers, or as none: right by the bound of what is computed."""

from __future__ import annotations

import pytest

from attnc.verify.case import Case
from tests.by_day import some_by_day
from tests.targets import EACH, skip_without_compiler, small_tiles
from tests.verify.judging import assert_within_bound, spec, subject_of_text

SCORES = (
    "max(dot(q, k), 1e-60)",
    "max(dot(q, k), 1e-40)",
    "dot(q, k) * 1e-60 + exp(1e-40 * q_idx)",
    "where(kv_idx < 3, -3.4028234663852886e+38, dot(q, k))",
    "1e-38 * tanh(dot(q, k) * 1e-20)",
)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("score", "target"), some_by_day(SCORES, EACH, of=2))
def test_a_score_is_right(score: str, target: str) -> None:
    skip_without_compiler(target)
    lines = (
        "input q: f16[B, M, H, 16]",
        "input k, v: f16[B, N, H, 16]",
        f"score = {score}",
        "normalize = softmax",
        "output o: f16[B, M, H, 16]",
        "grad q, k, v",
    )
    made = subject_of_text(spec(lines, small_tiles(target), target=target))
    assert_within_bound(made, Case(dims={"B": 1, "M": 20, "N": 40, "H": 1}, seed=1))


@pytest.mark.parametrize("target", EACH)
def test_a_row_of_the_least_numbers_sees_nothing(target: str) -> None:
    """With a factor of log2(e) these are infinite, as a constant -inf is, and no row is NaN."""
    import torch

    skip_without_compiler(target)
    lines = (
        "input q: f16[B, M, H, 16]",
        "input k, v: f16[B, N, H, 16]",
        "score = where(q_idx < 3, -3.4028234663852886e+38, dot(q, k))",
        "normalize = softmax",
        "output o: f16[B, M, H, 16]",
    )
    made = subject_of_text(spec(lines, small_tiles(target), target=target))
    q, k, v = (torch.ones(1, 20, 1, 16, dtype=torch.float16) for _ in "qkv")
    o = torch.full_like(q, torch.nan)
    made.run({"q": q, "k": k, "v": v}, {"o": o})
    assert not o.isnan().any()
