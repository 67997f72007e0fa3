"""Rows of v behind the last key of a packed sequence may be anything: Hopper's gradients do not see them."""

from __future__ import annotations

import pytest

from attnc.verify.case import Case
from tests.targets import needs_gxx
from tests.verify.judging import assert_within_bound, spec, subject_of_text

pytestmark = [pytest.mark.slow, needs_gxx]

LINES = (
    "input q: bf16[T, H, 16] via ragged(q_ends)",
    "input k: bf16[S, H, 16] via ragged(k_ends)",
    "input v: bf16[S, H, 40] via ragged(k_ends)",
    "input q_ends, k_ends: i32[B + 1]",
    "input seen: i32[H, N]",
    "input rate: f32[]",
    "input draws: i64[]",
    "score = dot(q, k)",
    "mask = kv_idx < 30 + seen[h, kv_idx]",
    "output o: bf16[T, H, 40]",
    "normalize = softmax(dropout = rate, seed = draws)",
    "grad q, k, v",
)
SCHEDULE = "consumers = 2, tile.kv = 32, stages = 2\n  backward { accumulate.dq = two_pass }"


def test_dropout_beside_a_loaded_mask() -> None:
    made = subject_of_text(spec(LINES, SCHEDULE, target="cuda.sm_90a"))
    for seed in (0, 79):
        assert_within_bound(made, Case(dims={"B": 2, "H": 2, "M": 20, "N": 40}, seed=seed))
