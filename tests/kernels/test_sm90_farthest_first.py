"""Packed gradients on Hopper: tiles that walk farthest come first in the last section, each once."""

from __future__ import annotations

import pytest

from attnc.verify.case import Case
from tests.by_day import some_by_day
from tests.targets import needs_gxx
from tests.verify.judging import assert_within_bound, spec, subject_of_text

pytestmark = [pytest.mark.slow, needs_gxx]

LINES = (
    "input q: bf16[T, Hkv * G, 64] via ragged(q_ends)",
    "input k, v: bf16[S, Hkv, 64] via ragged(k_ends)",
    "input q_ends, k_ends: i32[B + 1]",
    "score = dot(q, k)",
    "normalize = softmax",
    "output o: bf16[T, Hkv * G, 64]",
    "grad q, k, v",
)
SCHEDULE = "softmax = online(maximum = lazy(20))\n  backward { accumulate.dq = atomic }"


SIZES = {
    "b5": {"B": 5, "M": 70, "N": 200, "Hkv": 2, "G": 1},
    "b70": {"B": 70, "M": 3, "N": 5, "Hkv": 1, "G": 1},  # more sequences than lanes
    "b40": {"B": 40, "M": 2, "N": 150, "Hkv": 1, "G": 1},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("sizes", "mask"), some_by_day(SIZES, ["causal", "true"], of=3))
def test_every_tile_is_taken(sizes: str, mask: str) -> None:
    made = subject_of_text(spec((*LINES, f"mask = {mask}"), SCHEDULE, target="cuda.sm_90a"))
    for seed in (0, 1):
        assert_within_bound(made, Case(dims=SIZES[sizes], seed=seed))
