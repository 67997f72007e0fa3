"""`order = absolute(...)` in an attention, and what it means for each variant."""

import pytest

from attnc.model.variants import variants
from attnc.source import Source
from attnc.syntax.format import format_file
from attnc.syntax.parser import parse
from tests.model.resolving import plain, resolve_text


def test_an_order_is_open_unless_a_spec_says_it() -> None:
    (attention,) = resolve_text(plain()).attentions
    assert attention.segment is None
    assert attention.segment_keys == 0


def test_the_size_of_a_segment_may_be_a_param() -> None:
    program = resolve_text(plain("param S in {1024, 2048}\n  order = absolute(S)"))
    found = variants(program, program.attentions[0])
    assert sorted({variant.attention.segment_keys for variant in found}) == [1024, 2048]


def test_an_order_is_formatted() -> None:
    text = plain("order   =  absolute( 2048 )")
    assert "\n  order = absolute(2048)\n" in format_file(parse(Source("a.attn", text)))


def test_segments_have_a_usual_size() -> None:
    (attention,) = resolve_text(plain("order = absolute")).attentions
    assert attention.segment_keys == 2048
    assert "\n  order = absolute\n" in format_file(parse(Source("a.attn", plain("order  = absolute"))))


@pytest.mark.parametrize("keys", [16, 48, 1 << 20])
def test_segments_are_multiples_of_the_depth_of_products(keys: int) -> None:
    (attention,) = resolve_text(plain(f"order = absolute({keys})")).attentions
    assert attention.segment_keys == keys
