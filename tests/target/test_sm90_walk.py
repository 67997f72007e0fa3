"""The walk over key tiles, as text."""

from __future__ import annotations

from tests.target.texts import hopper_text_of


def test_partial_tiles_at_the_end_leave_a_key_before_which_all_see() -> None:
    causal = hopper_text_of("causal_gqa", "bf16_d128").keys
    assert causal.all_rows_see == "kv_lo < all_see_hi"
    window = hopper_text_of("window").keys
    assert window.all_rows_see.startswith("max(kv_lo, ")


def test_the_first_tile_of_all_consumers_is_published_where_each_has_its_own() -> None:
    assert hopper_text_of("window").keys.lo_of_all == "work.first_tile"
    assert hopper_text_of("causal_gqa", "bf16_d128").keys.lo_of_all == "0"


def test_lanes_search_together_for_the_bounds_of_each_consumer() -> None:
    assert hopper_text_of("document").keys.search_lanes == "(32 / (BLOCK_M / 64))"
    assert hopper_text_of("causal_gqa", "bf16_d128").keys.search_lanes == ""
