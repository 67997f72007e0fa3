"""Rows that an epilogue loads, as text."""

from __future__ import annotations

import re

from attnc.target.files import render_files
from tests.target.texts import hopper_text_of
from tests.verify.judging import modules_of, spec


def test_a_gate_is_loaded_by_pairs_of_columns() -> None:
    (row,) = hopper_text_of("gated", "d256").finish.paired
    assert row.first == row.at.replace(" + d * args.stride_gate_3", "")
    assert row.stride.startswith(f"args.stride_{row.name.split('_')[0]}")
    assert row.condition == ("" if row.exists == "true" else f"if ({row.exists}) ")


def test_an_element_of_a_pair_is_half_of_a_word() -> None:
    text = hopper_text_of("gated", "d256")
    (row,), epilogue = text.finish.paired, text.kernel.epilogue
    assert epilogue is not None
    lines = [text.finish.statement(fetch) for fetch in epilogue.fetches]
    assert any(f"{row.name}_pairs[r][j] >> 16 * c" in line for line in lines)


def test_what_is_computed_ahead_is_read_by_its_name() -> None:
    finish = hopper_text_of("gated", "d128").finish
    assert finish.staged is not None
    assert (finish.paired, finish.value) == ((), f"{finish.staged.name} * o")
    assert (finish.staged.in_pairs, finish.ahead) == (True, finish.staged.fetch.name)


def test_a_tensor_that_tma_alone_copies_has_no_address() -> None:
    text = hopper_text_of("gated", "d128")
    assert "gate" in text.arguments.maps
    assert "gate" not in text.arguments.names
    assert text.finish.box_beside == "h, b"


def test_kernels_without_an_epilogue_load_no_rows() -> None:
    finish = hopper_text_of("causal_gqa", "bf16_d128").finish
    assert (finish.paired, finish.staged) == ((), None)


def test_the_number_of_a_row_is_loaded_wherever_the_row_is() -> None:
    """Where rows are asked for, where one is copied ahead, where others are loaded, and where o is made."""
    lines = (
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64]",
        "input rows: i32[B, M]",
        "input places: i32[B, N]",
        "input w, x: bf16[R, 64]",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: bf16[B, M, H, 64] = w[rows[b, q_idx], d] * attention + x[places[b, q_pos], d]",
    )
    (module,) = modules_of(spec(lines, target="cuda.sm_90a"))
    text = render_files(module, path="a.attn", sha256="")["default.cu"]
    for name, places in (("rows_q", 1), ("places_q", 2)):
        blocks = text.split(f"const int {name} = ")
        assert len(blocks) == 1 + places
        assert not re.search(rf"\b{name}\b", blocks[0])
        for block in blocks[1:]:
            assert re.search(rf"\b{name} \* args", block)
