"""Rows that an epilogue loads, as text."""

from __future__ import annotations

from tests.target.texts import hopper_text_of


def test_a_gate_is_loaded_by_pairs_of_columns() -> None:
    (row,) = hopper_text_of("gated", "d256").finish.paired
    assert row.first == row.at.replace("d * ", "0 * ")
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


def test_kernels_without_an_epilogue_load_no_rows() -> None:
    finish = hopper_text_of("causal_gqa", "bf16_d128").finish
    assert (finish.paired, finish.staged) == ((), None)
