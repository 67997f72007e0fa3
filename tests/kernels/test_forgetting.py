"""Scores that forget: tiles of forgotten keys are not visited, in gradients too; those that count are."""

from __future__ import annotations

import math

import pytest
import torch

from attnc.verify.subject import Subject
from tests.by_day import some_by_day
from tests.targets import EACH, skip_without_compiler, small_tiles
from tests.verify.judging import right_by_day, spec, subject_of_text

FORGETTING = (
    "input q: bf16[B, M, H, 64]",
    "input k, v: bf16[B, N, H, 64]",
    "input c: f32[B, H, N] is descending",
    "score = dot(q, k) / sqrt(D) + c[b, h, q_pos] - c[b, h, kv_idx]",
    "mask = causal",
    "normalize = softmax",
    "output o: bf16[B, M, H, 64]",
    "grad q, k, v, c",
)
#: Another axis order, documents, a soft cap, heads that share keys, a sink.
CAPPED = (
    "input q: f16[B, Hkv * G, M, 64]",
    "input k, v: f16[B, Hkv, N, 64]",
    "input c: f32[Hkv * G, N] is descending",
    "input doc: i32[B, N] is sorted",
    "input sink: f32[Hkv * G]",
    "score = softcap(dot(q, k) / sqrt(D), 20) - c[h, kv_idx] + c[h, q_pos]",
    "mask = causal and doc[b, q_pos] == doc[b, kv_idx]",
    "normalize = softmax(sink = sink[h])",
    "output o: f16[B, Hkv * G, M, 64]",
    "output lse: f32[B, Hkv * G, M]",
    "grad q, k, v, c, sink",
)
#: Rows and keys: several tiles of every target.
N, LATE = 448, 384


def forgetting(target: str) -> Subject:
    skip_without_compiler(target)
    schedule = "" if target == "cuda.sm_90a" else small_tiles(target)
    return subject_of_text(spec(FORGETTING, schedule, target=target))


def inputs(subject: Subject, step: float) -> list[torch.Tensor]:
    """q, k, v and c, which falls by so much with every key."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, N, 1, 64, generator=generator).bfloat16() for _ in range(3)]
    c = (-step * torch.arange(N, dtype=torch.float32)).expand(1, 1, N).contiguous()
    return [x.to(subject.device) for x in (*made, c)]


KINDS = {"plain": FORGETTING, "capped": CAPPED}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kind", "target"), some_by_day(KINDS, EACH, of=2))
def test_forgetting_is_right(kind: str, target: str) -> None:
    skip_without_compiler(target)
    right_by_day(subject_of_text(spec(KINDS[kind], small_tiles(target), target=target)), count=2)


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("target", EACH)
def test_forgotten_tiles_are_not_visited(target: str) -> None:
    """What late rows do not visit may be NaN, and so may what early keys do not."""
    subject = forgetting(target)
    q, k, v, c = inputs(subject, 1.0)
    v[:, :128] = math.nan
    for x in (q, k, v, c):
        x.requires_grad_()
    o = subject.function(q, k, v, c)
    assert o[:, LATE:].isfinite().all()
    assert not o[:, :128].isfinite().any()
    dq, dk, dv, dc = torch.autograd.grad(o, (q, k, v, c), torch.ones_like(o))
    assert all(x.isfinite().all() for x in (dq[:, LATE:], dk[:, LATE:], dv[:, LATE:], dc[..., LATE:]))
    with torch.no_grad():
        v[:, :128] = 1
    do = torch.ones_like(o)
    do[:, LATE:] = math.nan
    _, dk, dv, _ = torch.autograd.grad(subject.function(q, k, v, c), (q, k, v, c), do)
    assert dk[:, :128].isfinite().all()
    assert dv[:, :128].isfinite().all()
    assert not dv[:, LATE:].isfinite().any()


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("target", EACH)
def test_a_key_that_is_far_back_but_counts_is_visited(target: str) -> None:
    """Queries are parallel to the first keys and opposite to all later ones: their products make up for any
    decay within the margin.
    """
    subject = forgetting(target)
    q, k, v, c = inputs(subject, 0.0)
    direction = torch.full((64,), 1.5, dtype=torch.bfloat16, device=subject.device)
    q[:], k[:] = direction, -direction
    k[:, :64] = direction
    gap = 2 * float(direction.float() @ direction.float()) / 8  # of the scores, without decay
    for left in (-2.0, 4.0):  # the first keys weigh more than all others, or 2 % of them
        c[:] = 0.0
        c[..., 64:] = -(gap + left)
        o = subject.function(q, k, v, c)[0, LATE:, 0].double()
        weights = torch.ones(N - LATE, N, dtype=torch.float64, device=o.device).tril(LATE)
        weights[:, :64] *= math.exp(-left)
        expected = weights / weights.sum(1, keepdim=True) @ v[0, :, 0].double()
        torch.testing.assert_close(o, expected, rtol=0, atol=2.0**-7)
