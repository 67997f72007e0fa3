"""Which masks read bits of words that a kernel loads once for a tile of keys."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import show
from attnc.plan.ir import Decode
from tests.verify.judging import modules_of, spec


def places(mask: str, target: str = "cuda.sm_90a", kind: str = "i32", schedule: str = "") -> list[str]:
    """The numbers of bits, as functions of the key, that the plan of a mask finds in words."""
    lines = (
        "input q: bf16[B, M, Hkv * G, 128]",
        "input k, v: bf16[B, N, Hkv, 128]",
        f"input seen: {kind}[B, T, W]",
        "score = dot(q, k)",
        f"mask = {mask}",
        "normalize = softmax",
        "output o: bf16[B, M, Hkv * G, 128]",
    )
    (module,) = modules_of(spec(lines, f"loops = [kv], pack = gqa{schedule}", target=target))
    assert isinstance(module.kernel, Decode)
    return [show(bits.place) for bits in module.kernel.step.bits]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("draft_tree(seen, 32)", ["kv_idx - (N - M)"]),
        ("causal and draft_tree(seen, 32)", ["kv_idx - (N - M)"]),
        ("bit(seen[b, q_idx, kv_idx // 32], kv_idx % 32)", ["kv_idx"]),
        ("not bit(seen[b, q_idx, kv_idx // 32], kv_idx % 32)", ["kv_idx"]),
    ],
)
def test_bits_that_go_up_with_the_key_lie_beside_each_other(mask: str, expected: list[str]) -> None:
    assert places(mask) == expected


@pytest.mark.parametrize(
    "mask",
    [
        "draft_tree(seen, 16)",
        "bit(seen[b, q_idx, kv_idx // 32], 31 - kv_idx % 32)",
        "bit(seen[b, q_idx, kv_idx // 32], kv_idx % 16)",
        "bit(seen[b, q_idx, 2 * kv_idx // 32], 2 * kv_idx % 32)",
        "bit(seen[b, q_idx, (kv_idx - q_idx) // 32], (kv_idx - q_idx) % 32)",
        "bit(seen[b, kv_idx, kv_idx // 32], kv_idx % 32)",
        "bit(seen[b, q_idx, kv_idx // 32], kv_idx % 32) and seen[b, q_idx, kv_idx // 32] != 7",
    ],
)
def test_other_bits_are_asked_for_key_by_key(mask: str) -> None:
    assert places(mask) == []


@pytest.mark.parametrize(
    ("target", "kind", "schedule"),
    [
        ("cuda.sm_80", "i32", ""),
        ("triton", "i32", ""),
        ("cuda.sm_90a", "i64", ""),
        ("cuda.sm_90a", "u8", ""),
        ("cuda.sm_90a", "i32", ", warp_split = kv"),
    ],
)
def test_other_kernels_and_words_ask_key_by_key(target: str, kind: str, schedule: str) -> None:
    assert places("draft_tree(seen, 32)", target, kind, schedule) == []
