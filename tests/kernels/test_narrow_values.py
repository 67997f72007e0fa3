"""Values of fewer columns than keys, whose tiles have as many (`signature.value_columns`)."""

from __future__ import annotations

import pytest

from tests.verify.judging import right_by_day, spec, subject_of_text

PLAIN = (
    "input q: f16[B, M, Hkv * G, 64]",
    "input k: f16[B, N, Hkv, 64]",
    "input v: f16[B, N, Hkv, 8]",
    "score = dot(q, k) / 8",
    "mask = causal",
    "normalize = softmax",
)
PACKED = (
    "input q: bf16[T, Hkv * G, 32] via ragged(cu_q)",
    "input k: bf16[S, Hkv, 32] via ragged(cu_k)",
    "input v: bf16[S, Hkv, 16] via ragged(cu_k)",
    "input cu_q, cu_k: i32[B + 1]",
    "score = dot(q, k) / 8",
    "normalize = softmax",
)
SMALL = "tile.q = 16, tile.kv = 16"


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("lines", "schedule"),
    [
        ((*PLAIN, "output o: f16[B, M, Hkv * G, 8]", "grad q, k, v"), SMALL),
        ((*PLAIN, "output o: f16[B, M, Hkv * G, 8] = attention * 0.5", "grad q, k, v"), SMALL),
        ((*PLAIN, "output o: f16[B, M, Hkv * G, 8]"), f"loops = [kv, q], {SMALL}"),
        ((*PLAIN, "output o: f16[B, M, Hkv * G, 8]"), f"loops = [kv], split.kv = auto, {SMALL}"),
        ((*PACKED, "output o: bf16[T, Hkv * G, 16]", "grad q, k, v"), SMALL),
    ],
    ids=["gradients", "epilogue", "outer keys", "decode", "packed"],
)
def test_values_narrower_than_keys(lines: tuple[str, ...], schedule: str) -> None:
    if "loops" not in schedule:
        schedule = f"loops = [q, kv], {schedule}"
    right_by_day(subject_of_text(spec(lines, schedule)))
