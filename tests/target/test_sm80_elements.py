"""How elements are rounded and paired."""

from __future__ import annotations

import pytest

from attnc.target.sm80.elements import Elements


def test_two_floats_are_rounded_at_once_or_kept() -> None:
    narrow, wide = Elements(is_f32=False), Elements(is_f32=True)
    assert (narrow.pair("a", "b"), narrow.pair_type, narrow.no_pair) == ("pack(a, b)", "u32", "0")
    assert (wide.pair("a", "b"), wide.pair_type, wide.no_pair) == ("Pair{a, b}", "Pair", "Pair{}")
    assert [narrow.of_pair(i) for i in (0, 1)] == [
        "element{(unsigned short)pair}",
        "element{(unsigned short)(pair >> 16)}",
    ]
    assert [wide.of_pair(i) for i in (0, 1)] == ["pair.values[0]", "pair.values[1]"]
    assert (narrow.as_float("x"), wide.as_float("x")) == ("to_float(x)", "x")


@pytest.mark.parametrize(
    ("is_f32", "products_of", "template"),
    [
        (False, "", "cuda/_products.cu.jinja"),
        (True, "", "cuda/_products_tf32.cu.jinja"),
        (True, "backward_", "cuda/_backward_products_tf32.cu.jinja"),
    ],
)
def test_products_have_a_template_for_each_width(is_f32: bool, products_of: str, template: str) -> None:
    assert Elements(is_f32=is_f32, products_of=products_of).products == template
