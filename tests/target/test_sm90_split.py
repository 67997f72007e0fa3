"""The split of a block on Hopper, as text."""

from __future__ import annotations

from tests.target.texts import hopper_decode_text_of


def test_a_first_tile_that_no_length_decides_is_known_before_them() -> None:
    text = hopper_decode_text_of("decode")
    assert text.split is not None
    assert text.starts_early
    assert text.split.start[-1].startswith("const int split_lo = ")
    assert text.split.bounds == ["const int split_hi = hi;"]


def test_a_window_is_cut_once_its_first_key_is_known() -> None:
    text = hopper_decode_text_of("decode", "d64")
    assert text.split is not None
    assert len(text.split.start) + len(text.split.bounds) == 4
