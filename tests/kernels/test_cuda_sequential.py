"""FlashAttention-1's order of the backward on the CUDA target: one block of threads adds to a head's dq."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from attnc.verify.properties import violations
from tests.by_day import each_by_day
from tests.kernels import test_packed_gradients as packed
from tests.kernels.test_packed_gradients import PLAIN, case
from tests.targets import needs_gxx
from tests.verify.judging import assert_within_bound

pytestmark = [
    pytest.mark.slow,
    needs_gxx,
]

SCHEDULE = """schedule a for cuda.sm_80 {
  tile.q = 32, tile.kv = 32, warps = 2
  backward {
    loops = [kv, q], accumulate.dq = sequential
    dkdv {
      tile.q in {16, 64}, tile.kv = 32, warps in {2, 1}, stages in {2, 1}
    }
  }
}"""
subject = partial(packed.subject, PLAIN, schedule=SCHEDULE)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "spec",
    each_by_day(
        [
            {},
            {"mask": "window(9, 4)"},
            {"heads": "H", "grads": "q, v"},
            {
                "softmax": "softmax(sink = sink[h])",
                "extras": "input sink: f32[Hkv * G]",
                "grads": "q, k, v, sink",
            },
            {
                "softmax": "softmax(dropout = p, seed = seed)",
                "extras": "input p: f32[]\n  input seed: i64[]",
            },
            {
                "score": "dot(q, k) / 4 - slope[h] * abs(q_pos - kv_idx) * 0.1",
                "extras": "input slope: f32[Hkv * G]",
                "grads": "q, k, v, slope",
            },
            {
                "score": "dot(q, k) / 4 + column[kv_idx] + pair[b, h, q_idx, kv_idx]",
                "extras": "input column: f32[N]\n  input pair: f16[B, Hkv * G, M, N]",
                "grads": "q, k, v, column, pair",
            },
        ],
        of=2,
    ),
    ids=lambda spec: ", ".join(f"{value}"[:24] for value in spec.values()) or "plain",
)
def test_every_feature(spec: dict[str, Any]) -> None:
    made = subject(**spec)
    for seed in (0, 3):
        assert_within_bound(made, case(made, seed), fills=("nan",))


def test_properties() -> None:
    """Among them that two runs, whose blocks come in another order, give the same bits."""
    made = subject()
    assert list(violations(made, case(made, 2))) == []
