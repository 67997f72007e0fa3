"""Gradients where values are columns of the keys, by `mma.sync`: warps share scores, and sum both parts."""

from __future__ import annotations

import pytest

from attnc.verify.case import Case
from tests.by_day import some_by_day
from tests.targets import needs_gxx
from tests.verify.judging import assert_within_bound, spec, subject_of_text

pytestmark = needs_gxx
#: Grouped heads, a bias, a mask without gaps; D is padded to products.
GROUPED = (
    "input q: {0}[B, M, Hkv * G, 72]",
    "input k: {0}[B, N, Hkv, 72]",
    "input v: {0}[B, N, Hkv, 48] via prefix(k)",
    "input bias: f32[Hkv * G, N]",
    "input draws: i64[]",
    "score = softcap(dot(q, k) / sqrt(D), 20) + bias[h, kv_idx]",
    "mask = causal",
    "normalize = softmax(dropout = 0.25, seed = draws)",
    "output o: {0}[B, M, Hkv * G, 48]",
    "output lse: f32[B, Hkv * G, M]",
    "grad q, k",
)
#: Keys with gaps, lengths, a gradient that is kept in f32.
GAPS = (
    "input q: {0}[B, M, H, 64]",
    "input k: {0}[B, N, H, 64]",
    "input v: {0}[B, N, H, 64] via prefix(k)",
    "input rows, keys: i32[B]",
    "length M = rows[b]",
    "length N = keys[b]",
    "score = 20 * dot(q, k)",
    "mask = kv_idx % 3 != 1 and window(30, 9)",
    "normalize = softmax(sink = 0.5)",
    "output o: {0}[B, M, H, 64]",
    "grad k: f32",
)
#: Packed sequences, with weights below 0 left out.
PACKED = (
    "input q: {0}[T, H, 80] via ragged(ends)",
    "input k: {0}[T, 1, 80] via ragged(ends)",
    "input v: {0}[T, 1, 16] via prefix(k)",
    "input ends: i32[B + 1]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = softpick",
    "output o: {0}[T, H, 16]",
    "output lse: f32[H, T]",
    "grad q, k",
)
SPECS = {"grouped": GROUPED, "gaps": GAPS, "packed": PACKED}
#: Warps that have all columns of their scores; that share them, by two and four; keys of one fragment.
TILES = {
    "default": "",
    "by two": "tile.q = 32, tile.kv = 64, warps = 8, stages = 1",
    "small": "tile.q = 32, tile.kv = 32, warps = 4, stages = 2",
    "by four": """dq { tile.q = 16, tile.kv = 64, warps = 4, stages = 1 }
    dkdv { tile.q = 32, tile.kv = 16, warps = 2, stages = 2 }""",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "tiles"), some_by_day(SPECS, TILES, of=4))
def test_latent_gradients(kind: str, tiles: str) -> None:
    lines = SPECS[kind]
    element = "bf16" if TILES[tiles] else "f16"
    schedule = f"order = longest_first\n  backward {{ {TILES[tiles]} }}"
    text = spec([line.format(element) for line in lines], schedule, target="cuda.sm_80")
    dims = {"B": 2, "M": 67, "N": 67 if lines is PACKED else 101, "Hkv": 2, "G": 2, "H": 2}
    assert_within_bound(subject_of_text(text), Case(dims=dims))
