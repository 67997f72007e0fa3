"""Sums at the edges of tiles of the kernels of stick-breaking's gradients."""

from __future__ import annotations

import pytest

from attnc.target.sm80.arguments import ArgumentText
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


def sums(d: int = 16, heads: str = "Hkv * G", more: str = "", grads: str = "q, k, v") -> list[str]:
    """What blocks that share query heads sum, under a score with a bias of each key where `more` says so."""
    lines = (
        f"input q: bf16[B, M, {heads}, {d}]",
        f"input k, v: bf16[B, N, {heads.split(' ')[0]}, {d}]",
        *(["input bias: f32[B, N]"] if more else []),
        f"score = dot(q, k) / sqrt({d}){more}",
        "mask = causal",
        "normalize = stick_breaking",
        f"output o: bf16[B, M, {heads}, {d}]",
        f"grad {grads}",
    )
    (module,) = modules_of(spec(lines, "", target="cuda.sm_80"))
    return ArgumentText(module).parts


def test_blocks_share_the_query_heads_of_a_kv_head() -> None:
    assert sums() == ["dk_sum", "dv_sum"]


def test_heads_that_share_no_keys_and_other_sums_stay_with_one_block() -> None:
    assert sums(heads="H") == []
    assert sums(d=256) == []
    assert sums(more=" + bias[b, kv_idx]", grads="q, k, v, bias") == []
