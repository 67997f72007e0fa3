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


LATENT = [
    "input v: {0}[B, N, 1, 512] via prefix(k)",
    "score = dot(q, k)",
    "normalize = softmax",
    "output o: bf16[B, M, G, 512]",
]


def test_splits_of_8_bits_are_joined_as_those_of_16() -> None:
    """Threads share out the splits of a row, and add what they have: as many of them, though more convert."""
    joining = []
    for dtype in ("bf16", "e4m3"):
        lines = ["input q: bf16[B, M, G, 576]", f"input k: {dtype}[B, N, 1, 576]", *LATENT]
        (module,) = modules_of(
            spec(
                [line.format(dtype) for line in lines],
                "loops = [kv], pack = gqa, split.kv = 8",
                target="cuda.sm_90a",
            )
        )
        (text,) = (
            text for name, text in render_files(module, path="a.attn", sha256="").items() if ".cu" in name
        )
        sizes = {"DV": 512, "THREADS": 32 * module.kernel.configs[0].warps, "CONSUMERS": 2}
        groups = text[text.index("GROUPS = ") :].partition(" = ")[2].partition(";")[0]
        joining.append((sizes["THREADS"], eval(groups.replace("/", "//"), {}, {**sizes, "LANES": 512 // 4})))
    assert joining == [(384, 3), (512, 3)]
