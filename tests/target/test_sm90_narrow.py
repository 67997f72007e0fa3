"""What a Hopper kernel's text says of keys and values of 8 bits, and that others say nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc.plan.sm90 import decode_layout_of
from attnc.target.files import render_files
from tests.plans import module_of
from tests.verify.judging import modules_of, spec


def texts(k: str, v: str) -> tuple[str, list[tuple[str, str, int, int]]]:
    """The text of a kernel, and of what it converts the name, type, number and panels."""
    lines = [
        "input q: bf16[B, M, H, 192]",
        f"input k: {k}[B, N, H, 192]",
        f"input v: {v}[B, N, H, 128]",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: bf16[B, M, H, 128]",
    ]
    (module,) = modules_of(spec(lines, "loops = [kv], split.kv = 2, tile.kv = 32", target="cuda.sm_90a"))
    layout = decode_layout_of(module.kernel)
    files = render_files(module, path="a.attn", sha256="")
    text = next(text for name, text in files.items() if name.endswith(".cu"))
    return text, [(x.name, str(x.dtype), x.number, x.panels) for x in layout.narrow.parts]


@pytest.mark.parametrize(
    ("k", "v", "expected"),
    [
        ("e4m3", "i8", [("k", "e4m3", 0, 2), ("v", "i8", 1, 1)]),
        ("e5m2", "bf16", [("k", "e5m2", 0, 2)]),
        ("bf16", "e4m3", [("v", "e4m3", 0, 1)]),
    ],
)
def test_what_is_converted_is_told_by_type_and_panels(
    k: str, v: str, expected: list[tuple[str, str, int, int]]
) -> None:
    text, parts = texts(k, v)
    assert parts == expected
    for name, stored, _, panels in expected:
        letter = name.upper()
        panel = "BLOCK_N * 128"
        assert f"RAW_{letter}_BYTES = {panel if panels == 1 else f'{panels} * {panel}'}" in text
        assert f"convert_rows<{stored}, OWN_ROWS, {'QK' if name == 'k' else 'V'}_PANELS>" in text


def test_kernels_for_16_bits_do_not_know_of_it() -> None:
    text, parts = texts("bf16", "bf16")
    assert parts == []
    assert not any(word in text for word in ("RAW_", "OWN_ROWS", "sm90_convert.cuh", "8 bits"))


@pytest.mark.parametrize(
    ("name", "asks"), [("kv8_latent", True), ("selected_rows", True), ("latent_types", False)]
)
def test_rows_are_asked_for_a_tile_ahead_where_registers_are_left(name: str, asks: bool) -> None:
    files = render_files(module_of(name, "cuda.sm_90a"), path="a.attn", sha256="")
    text = next(text for file, text in files.items() if file.endswith(".cu"))
    for said in ('#include "sm90_ask.cuh"', "row_of(next_lo, next_page));"):
        assert (said in text) == asks


def test_scales_of_rows_take_no_room_of_tiles_beside_sums_in_an_absolute_order() -> None:
    place = "block_table[b, kv_idx // 64], kv_idx % 64, d"
    lines = [
        "input q: bf16[B, M, G, 576]",
        "input k: e4m3[B, N, 1, 512] via paged(block_table, page = 64)",
        "input v: e4m3[B, N, 1, 512] via prefix(k)",
        "input scale: f32[R, 64, 4]",
        "input rope: bf16[R, 64, 64]",
        "input block_table: i32[B, P]",
        "input kv_len: i32[B]",
        "length N = kv_len[b]",
        f"score = dot(q, cat(k * scale[{place} // 128], rope[{place}])) / sqrt(192)",
        f"normalize = softmax(v_scale = scale[{place} // 128])",
        "order = absolute(1024)",
        "output o: bf16[B, M, G, 512]",
    ]
    schedule = "loops = [kv], pack = gqa, split.kv = fixed(1024), tile.kv = 64"
    (module,) = modules_of(spec(lines, schedule, target="cuda.sm_90a"))
    (config, *_) = module.kernel.configs
    assert "scales" not in decode_layout_of(module.kernel).shared_memory(config)
    files = render_files(module, path="a.attn", sha256="")
    text = next(text for name, text in files.items() if name.endswith(".cu"))
    assert "load_row_scales" in text
    assert "SCALES_AT" not in text
    # the walk descends, and pages are looked up two tiles ahead: none before the first key
    assert "const int key_row = max(kv_lo + own_row + gathered_row(), 0);" in text


def test_a_scale_that_is_a_power_of_two_by_its_byte_is_made_of_its_bits() -> None:
    text = (Path(__file__).parents[2] / "generated/latent_blocks/cuda_sm_90a/default.cu").read_text(
        encoding="utf-8"
    )
    assert text.count("return power_of(scale_tile);") == 2
    assert "exp2f(scale_tile" not in text
