"""Sinks of the types that models hold, with gradients, for every target."""

from __future__ import annotations

import pytest

from attnc.verify.case import Case
from tests.targets import EACH
from tests.verify.judging import assert_within_bound, spec, subject_of_text

SCHEDULES = {"triton": "tile.q = 16, tile.kv = 16", "cuda.sm_80": "tile.q = 64, tile.kv = 32"}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_sinks_of_16_bits(element: str, target: str) -> None:
    lines = (
        "input q: bf16[B, M, H, 16]",
        "input k, v: bf16[B, N, H, 16]",
        f"input sink: {element}[H]",
        "score = dot(q, k) / sqrt(D)",
        "mask = causal",
        "normalize = softmax(sink = sink[h])",
        "output o: bf16[B, M, H, 16]",
        "grad q, k, v, sink",
    )
    made = subject_of_text(spec(lines, SCHEDULES.get(target, ""), target=target))
    assert_within_bound(made, Case(dims={"B": 2, "M": 21, "N": 37, "H": 3}))
