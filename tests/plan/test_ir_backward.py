"""Which scores may be no finite number where there are no rows."""

from __future__ import annotations

import pytest

from attnc.plan.ir.backward import BackwardKernel
from tests.verify.judging import modules_of, spec

#: Scores, and whether one can be +inf or NaN in a row of zeros past the end.
SCORES = {
    "dot(q, k) / 4": False,
    "where(kv_idx < 3, -inf, dot(q, k))": False,
    "where(kv_idx < 3, -inf, dot(q, k)) / sqrt(D)": False,
    "min(dot(q, k), inf)": False,
    "max(dot(q, k), -inf)": False,
    "max(where(kv_idx < 3, -inf, dot(q, k)), -inf)": False,
    "dot(q, k) + where(kv_idx < 3, -inf, 0) + where(q_idx < 3, -inf, 0)": False,
    "softcap(dot(q, k), 30)": False,
    "exp(dot(q, k))": False,
    "dot(q, k) - where(kv_idx < 3, -inf, 0)": True,
    "where(kv_idx < 3, -inf, dot(q, k)) * -1": True,
    "-max(-inf, where(kv_idx < 3, -inf, dot(q, k)))": True,
    "max(dot(q, k), where(kv_idx < 3, inf, 0))": True,
    "abs(where(kv_idx < 3, -inf, dot(q, k)))": True,
    "dot(q, k) * exp(q_pos - kv_idx)": True,
    "dot(q, k) / x[q_idx]": True,
    "log(abs(dot(q, k)))": True,
    "dot(q, k) + x[q_idx] + pair[q_idx, kv_idx] + row[q_pos] - row[kv_idx]": False,
}


def _kernels(score: str) -> tuple[BackwardKernel, ...]:
    lines = (
        "input q: f16[B, M, 1, 16]",
        "input k, v: f16[B, N, 1, 16]",
        "input x: f32[M]",
        "input row: f32[N]",
        "input pair: f32[M, N]",
        "input table: f32[X]",
        f"score = {score}",
        "normalize = softmax",
        "output o: f16[B, M, 1, 16]",
        "grad q, k",
    )
    (module,) = modules_of(spec(lines))
    assert module.backward is not None
    return module.backward.kernels


@pytest.mark.parametrize("score", SCORES)
def test_scores_that_outgrow_an_infinite_lse(score: str) -> None:
    """p = exp2(score - inf) is 0 of its own in most scores, whose kernels then do not look."""
    assert {kernel.score_outgrows_lse for kernel in _kernels(score)} == {SCORES[score]}


@pytest.mark.parametrize("score", ["dot(q, k) + table[kv_idx - q_pos + N - 1]", "dot(q, k) + x[q_idx // 2]"])
def test_entries_that_rows_past_the_end_read_may_be_infinite(score: str) -> None:
    """What such rows give dq is not stored; dk and dv sum over all rows of a tile."""
    assert all(kernel.score_outgrows_lse != kernel.over_q for kernel in _kernels(score))


@pytest.mark.parametrize(
    ("score", "pole"), [("dot(q, k) * exp(q_pos - kv_idx)", True), ("exp(dot(q, k))", False)]
)
def test_slopes_that_are_infinite_past_the_end(score: str, pole: bool) -> None:
    """Also where the slope reads a value that it shares with the score."""
    assert all(bool(kernel.chain.shared) for kernel in _kernels(score))
    assert {kernel.chain.slope_has_pole for kernel in _kernels(score)} == {pole}
