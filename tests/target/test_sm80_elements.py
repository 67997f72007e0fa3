"""How elements are rounded and paired."""

from __future__ import annotations

from attnc.target.sm80.elements import Elements
from attnc.target.support import FOLDER, support_files


def test_two_floats_are_rounded_at_once_or_kept() -> None:
    narrow, wide = Elements(is_f32=False), Elements(is_f32=True)
    assert (narrow.pair("a", "b"), narrow.pair_type, narrow.no_pair) == ("pack(a, b)", "u32", "0")
    assert (wide.pair("a", "b"), wide.pair_type, wide.no_pair) == ("Pair{a, b}", "Pair", "Pair{}")
    assert [narrow.pair_element(i) for i in (0, 1)] == [
        "element{(unsigned short)pair}",
        "element{(unsigned short)(pair >> 16)}",
    ]
    assert [wide.pair_element(i) for i in (0, 1)] == ["pair.values[0]", "pair.values[1]"]
    assert (narrow.as_float("x"), wide.as_float("x")) == ("to_float(x)", "x")


def test_products_have_a_header_for_each_width() -> None:
    headers = [Elements(is_f32=wide).products for wide in (False, True)]
    assert headers == ["sm80_products.cuh", "sm80_products_tf32.cuh"]
    assert {f"{FOLDER}/{name}" for name in headers} <= support_files().keys()
