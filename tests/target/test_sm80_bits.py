"""Words whose bits the mask of a tile reads, as text."""

from __future__ import annotations

from attnc.expr.nodes import show
from tests.target.texts import hopper_decode_text_of, hopper_text_of


def test_a_word_is_loaded_by_its_number_and_a_bit_by_its_place_in_the_tile() -> None:
    (words,) = hopper_decode_text_of("tree", "d128").step.bits
    assert words.first == "kv_lo - (N - M)"
    assert "0 <= word && word < W" in words.value
    assert "word * args.stride_tree_2" in words.value
    read, stands = words.bit
    assert show(read).startswith("bit(tree_tile, ")
    assert show(stands) == "(tree_tile_bits[r][j / 4] >> (8 * j % 32 + c) & 1) != 0"


def test_masks_of_positions_alone_read_no_words() -> None:
    assert hopper_text_of("causal_gqa", "bf16_d128").step.bits == []


def test_the_step_loads_no_word_for_each_key() -> None:
    step = hopper_decode_text_of("tree", "d128").step
    assert list(step.element_statements(step.mask_fetches)) == []
    assert "tree_tile_bits" in step.keep
