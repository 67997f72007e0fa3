"""The text of a Hopper decode kernel, where a plan changes it."""

from __future__ import annotations

import pytest

from attnc.target.files import render_files
from tests.verify.judging import modules_of, spec

STEP, FIRST, END = "const int split_step = ", "const int split_lo = ", "const int split_hi = "


@pytest.mark.parametrize(
    ("mask", "tile", "starts_early"),
    [("causal", "split * BLOCK_N;", True), ("window(100, 0)", "lo + split * BLOCK_N;", False)],
)
def test_the_first_tile_of_a_split_comes_before_lengths_unless_one_decides_it(
    mask: str, tile: str, starts_early: bool
) -> None:
    lines = [
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64]",
        "input seen: i32[B]",
        "length N = seen[b]",
        "score = dot(q, k)",
        f"mask = {mask}",
        "normalize = softmax",
        "output o: bf16[B, M, H, 64]",
    ]
    (module,) = modules_of(spec(lines, "loops = [kv], split.kv = 2, tile.kv = 64", target="cuda.sm_90a"))
    text = next(
        text for name, text in render_files(module, path="a.attn", sha256="").items() if ".cu" in name
    )
    places = [text.index(found) for found in (STEP, FIRST, END)]
    assert places == sorted(places)
    assert f"{FIRST}{tile}" in text
    assert (text.index(FIRST) < text.index("    N = max(")) is starts_early
