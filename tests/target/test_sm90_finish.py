"""Rows that an epilogue loads two columns at a time, as text."""

from __future__ import annotations

from tests.target.texts import hopper_text_of


def test_a_gate_is_loaded_by_pairs_of_columns() -> None:
    (row,) = hopper_text_of("gated").finish.paired
    assert row.first == row.at.replace("d * ", "0 * ")
    assert row.stride.startswith(f"args.stride_{row.name.split('_')[0]}")
    assert row.condition == ("" if row.exists == "true" else f"if ({row.exists}) ")


def test_an_element_of_a_pair_is_half_of_a_word() -> None:
    text = hopper_text_of("gated")
    (row,), epilogue = text.finish.paired, text.kernel.epilogue
    assert epilogue is not None
    lines = [text.finish.statement(fetch) for fetch in epilogue.fetches]
    assert any(f"{row.name}_pairs[r][j] >> 16 * c" in line for line in lines)


def test_kernels_without_an_epilogue_load_no_rows() -> None:
    assert hopper_text_of("causal_gqa", "bf16_d128").finish.paired == ()
