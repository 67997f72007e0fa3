"""FlashDecoding++: partial sums under one maximum, and what happens to scores that leave its range."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from attnc.verify.case import Case
from attnc.verify.data import LOGITS
from attnc.verify.properties import fallback_violations
from attnc.verify.subject import Subject
from tests.by_day import some_by_day
from tests.targets import small_decode_tiles
from tests.verify.judging import assert_within_bound, every_fill, for_every_target, subject_of_text

DIMS = {"B": 2, "M": 2, "N": 90, "Hkv": 2, "G": 3}
TARGET = "triton"
every_target = for_every_target(__name__)


def subject(
    *,
    score: str = "dot(q, k) / sqrt(D)",
    bounds: str = "[-60, 60]",
    phi: str = "0",
    splits: str = "3",
    sink: bool = False,
) -> Subject:
    tiles = small_decode_tiles(TARGET)
    text = f"""attention a {{
  input q: bf16[B, M, Hkv * G, 16]
  input k, v: bf16[B, N, Hkv, 16]
  {"input sink: f32[Hkv * G]" if sink else ""}
  score = {score}
  mask = window(70, 0)
  normalize = softmax{"(sink = sink[h])" if sink else ""}
  output o: bf16[B, M, Hkv * G, 16]
  output lse: f32[B, Hkv * G, M]
}}
schedule a for {TARGET} {{
  loops = [kv], pack = gqa, tile.q = 16, {tiles}, stages = 2, split.kv = {splits}
  softmax = unified_max(phi = {phi}, bounds = {bounds}, fallback = online)
}}
"""
    return subject_of_text(text)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("logits", "splits"), some_by_day(sorted(LOGITS), ["1", "3"], of=4))
def test_any_scores(logits: str, splits: str) -> None:
    """Those far outside the bounds too: the fallback makes the result as good as the online softmax's."""
    assert_within_bound(
        subject(splits=splits), Case(dims=DIMS, seed=1, logits=logits), fills=("nan", "large")
    )


@pytest.mark.one_in(6)
@pytest.mark.parametrize("special", ["nan_k", "inf_k", "nan_v", "inf_v", "nan_q"])
def test_special_values(special: str) -> None:
    assert_within_bound(subject(), Case(dims=DIMS, seed=2, special=special))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("phi", ["-20", "0", "20"])
def test_a_sink(phi: str) -> None:
    assert_within_bound(subject(sink=True, phi=phi), Case(dims=DIMS, seed=2), fills=every_fill())


@pytest.mark.parametrize(("splits", "cap"), [("1", 0), ("3", 0), ("1", 50)])
def test_a_row_without_keys_has_the_lse_of_its_sink(splits: str, cap: int) -> None:
    """However far the sink is from phi: exp2 of what is between them may be 0, or infinite. That a cap keeps
    scores within the bounds says nothing of a sink.
    """
    score = "dot(q, k) / sqrt(D)"
    module = subject(sink=True, splits=splits, score=f"softcap({score}, {cap})" if cap else score).module
    q, k = torch.ones(1, 3, 4, 16).bfloat16(), torch.ones(1, 1, 4, 16).bfloat16()  # two rows before the key
    sink = torch.tensor([-300.0, 300.0, 0.5, -math.inf])
    o, lse = module.a(q, k, k, sink)
    assert torch.allclose(lse[0, :, :2], sink[:, None].expand(-1, 2))
    assert not o[:, :2].any()
    assert lse[0, 0, 2].item() == pytest.approx(cap * math.tanh(4 / cap) if cap else 4.0, abs=1e-4)


def test_shares_that_are_done_again_are_counted() -> None:
    module = subject(bounds="[-4, 4]", splits="2").module
    q, k = torch.zeros(1, 1, 1, 16).bfloat16(), torch.zeros(1, 32, 1, 16).bfloat16()
    counter = torch.zeros(1, dtype=torch.int32)
    module.a(q, k, k, fallbacks=counter)
    assert counter.item() == 0
    q[..., 0], k[:, 20, :, 0] = 8.0, 8.0  # a score of 16 in the second split
    _, lse = module.a(q, k, k, fallbacks=counter)
    assert counter.item() == 1
    assert abs(lse.item() - math.log(31 + math.exp(16))) < 1e-5
    with pytest.raises(ValueError, match="fallbacks"):
        module.a(q, k, k, fallbacks=torch.zeros(2, dtype=torch.int32))


def test_values_that_overflow_the_sum_are_computed_again() -> None:
    module = subject(splits="1").module
    q, k = torch.zeros(1, 1, 1, 16).bfloat16(), torch.zeros(1, 20, 1, 16).bfloat16()
    q[..., 0], k[..., 0] = 15.0, 15.0  # exp(56) times 2**100 is beyond float32
    counter = torch.zeros(1, dtype=torch.int32)
    o, _ = module.a(q, k, torch.full_like(k, 2.0**100), fallbacks=counter)
    assert counter.item() == 1
    assert (o == 2.0**100).all()


def test_a_softcap_within_the_bounds_needs_no_fallback() -> None:
    made = subject(score="softcap(dot(q, k) / sqrt(D), 50)")
    assert "fallbacks" not in made.module.a.__kwdefaults__
    for logits in ("huge", "very_negative", "rising"):
        assert_within_bound(made, Case(dims=DIMS, seed=1, logits=logits), fills=every_fill())
    assert "fallbacks" in subject(score="softcap(dot(q, k) / sqrt(D), 61)").module.a.__kwdefaults__


def test_the_counter_is_held_to_the_scores() -> None:
    made = subject()
    assert not list(fallback_violations(made))
    silent: Any = ModuleType("silent")
    vars(silent).update(vars(made.module))
    silent.a = lambda *tensors, fallbacks, **options: made.module.a(*tensors, **options)
    (low, huge, *_) = fallback_violations(replace(made, module=silent))
    assert low.startswith("fallbacks: 0 are counted of low scores, expected")
    assert huge.startswith("fallbacks: 0 are counted of huge scores, expected")
