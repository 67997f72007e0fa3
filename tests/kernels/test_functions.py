"""Every function of the language, `inf` and comparisons of conditions: from text to results and gradients."""

from __future__ import annotations

from typing import Any

import pytest

from attnc.verify.case import Case
from attnc.verify.subject import Subject
from tests.by_day import each_by_day
from tests.targets import TARGETS, needs_gxx, skip_without_compiler, small_tiles
from tests.verify.judging import assert_within_bound, spec, subject_of_text

#: Scores with gradients of q, k, v and `x`, where it occurs.
SCORES = {
    "sigmoid": "4 * sigmoid(dot(q, k) / 4)",
    "silu": "dot(q, k) * sigmoid(dot(q, k))",
    "silu, spelled out": "dot(q, k) / (1 + exp(-dot(q, k)))",
    "a divisor that overflows": "dot(q, k) / (2 + exp(-dot(q, k)))",
    "a square": "dot(q, k) * dot(q, k) / 16",
    "gelu": "dot(q, k) * (1 + erf(dot(q, k) / sqrt(2))) / 2",
    "powers of two": "exp2(min(dot(q, k) / 4, 3)) + log2(dot(q, k) * dot(q, k) + x[h])",
    "waves": "3 * sin(dot(q, k)) + cos(x[h] * dot(q, k) / 4) * x[h]",
    "clamped": "clamp(dot(q, k) / 4, -x[h], 2) + clamp(kv_idx - q_idx, -3, 5) / 8",
    "excluded": "where(kv_idx % 3 == q_idx % 2, -inf, dot(q, k) / 4) + x[h]",
    "conditions": "where((kv_idx < 9) == (q_idx < 20), dot(q, k) / 4, min(dot(q, k), inf) * x[h])",
}
#: What the values reach: where exp overflows, where it vanishes, and infinities.
STYLES: tuple[dict[str, str], ...] = (
    {},
    {"logits": "very_negative"},
    {"logits": "huge"},
    {"logits": "large", "special": "inf_k"},
)


def scored(score: str, target: str, dtype: str) -> Subject:
    lines = [
        f"input q: {dtype}[B, M, H, 16]",
        f"input k, v: {dtype}[B, N, H, 16]",
        f"score = {score}",
        f"output o: {dtype}[B, M, H, 16]",
        "output lse: f32[B, H, M]",
        "normalize = softmax",
        f"grad q, k, v{', x' if 'x[h]' in score else ''}",
    ]
    if "x[h]" in score:
        lines.append("input x: f32[H]")
    return subject_of_text(spec(lines, small_tiles(target), target=target))


#: The same functions in two scores: a kernel takes seconds to compile for a CPU.
TOGETHER = {
    "silu": SCORES["silu"],
    "others": "where((kv_idx < 9) == (q_idx < 20), dot(q, k) * sigmoid(dot(q, k)) / 4, -inf) + x[h]"
    " + clamp(log2(dot(q, k) * dot(q, k) + 2), -x[h], 2) + erf(dot(q, k)) + exp2(min(dot(q, k), 1))"
    " + sin(dot(q, k)) * cos(x[h])",
}


def small(**style: Any) -> Case:
    return Case(dims={"B": 1, "M": 21, "N": 37, "H": 2}, seed=5, **style)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", each_by_day(SCORES, of=2))
def test_scores(name: str) -> None:
    made = scored(SCORES[name], "triton", "f16" if name == "clamped" else "f32")
    for style in STYLES:
        assert_within_bound(made, small(**style))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", TARGETS)
def test_sorted_integers_beside_a_number(target: str) -> None:
    """The search compares as the mask does: a number is no integer there."""
    skip_without_compiler(target)
    lines = (
        "input q: f32[B, M, H, 16]",
        "input k, v: f32[B, N, H, 16]",
        "input doc: i32[B, N] is sorted",
        "input x: f32[B]",
        "score = dot(q, k) / 4",
        "mask = doc[b, kv_idx] < x[b] or x[b] + 3 <= doc[b, kv_idx] <= inf",
        "normalize = softmax",
        "output o: f32[B, M, H, 16]",
    )
    made = subject_of_text(spec(lines, small_tiles(target), target=target))
    for seed in range(3):
        assert_within_bound(made, Case(dims={"B": 3, "M": 21, "N": 97, "H": 1}, seed=seed))


@pytest.mark.one_in(2)
@needs_gxx
@pytest.mark.parametrize("name", TOGETHER)
def test_scores_on_cuda(name: str) -> None:
    made = scored(TOGETHER[name], "cuda.sm_80", "f16")
    for style in STYLES:
        assert_within_bound(made, small(**style))
