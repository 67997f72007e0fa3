"""Sums at the edges of tiles of the kernels of stick-breaking's gradients."""

from __future__ import annotations

import pytest

from attnc.target.sticks import count_edges, hands_on
from tests.verify.judging import modules_of, spec

PLAIN = (
    "input q: bf16[B, M, H, 16]",
    "input k, v: bf16[B, N, H, 16]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = stick_breaking",
    "output o: bf16[B, M, H, 16]",
)


@pytest.mark.parametrize(("grads", "expected"), [("q, k", True), ("v", True), ("q", False)])
def test_a_kernel_over_queries_hands_on_what_one_over_keys_reads(grads: str, *, expected: bool) -> None:
    (module,) = modules_of(spec((*PLAIN, f"grad {grads}"), "", target="cuda.sm_80"))
    assert hands_on(module) is expected


def test_there_is_an_edge_for_each_tile_and_for_none() -> None:
    (module,) = modules_of(spec((*PLAIN, "grad q"), "", target="cuda.sm_80"))
    assert count_edges(module, "dq_config") == "max(cdiv(N, dq_config.BLOCK_N), 1)"
