"""Tiles in shared memory, and who copies them."""

from __future__ import annotations

from attnc.plan.sm80 import layout_of
from attnc.plan.sm80.layout import CudaLayout
from attnc.target.sm80.shared import Copiers, SharedTiles
from tests.plans import module_of


def layout(spec: str) -> CudaLayout:
    return layout_of(module_of(spec, "cuda.sm_80").kernel)


def test_tiles_that_are_alike_share_their_functions() -> None:
    tiles = SharedTiles(layout=layout("causal_gqa"))
    assert tiles.same
    assert [function for function, *_ in tiles.copied] == ["copy_rows"]
    assert (tiles.copy_q, tiles.copy_k, tiles.copy_v, tiles.at_value) == ("rows", "rows", "rows", "at")
    assert len(tiles.swizzles) == 1


def test_values_of_another_width_have_functions_of_their_own() -> None:
    tiles = SharedTiles(layout=layout("odd_dims"))
    assert not tiles.same
    assert [function for function, *_ in tiles.copied] == ["copy_qk_rows", "copy_v_rows"]
    assert (tiles.copy_v, tiles.at_value, tiles.below_value) == ("v_rows", "at_v", "below_v")
    assert [suffix for suffix, *_ in tiles.swizzles] == ["_qk", "_v"]


def test_keys_in_pages_are_copied_page_by_page() -> None:
    tiles = SharedTiles(layout=layout("causal_gqa"), page=16)
    assert [function for function, *_ in tiles.copied] == ["copy_rows"]
    assert [function for function, *_ in tiles.paged] == ["copy_pages"]
    assert (tiles.copy_q, tiles.copy_k, tiles.copy_v) == ("rows", "pages", "pages")


def test_warps_with_keys_of_their_own_copy_them_without_the_others() -> None:
    alone, together = Copiers(by_warp=True), Copiers(by_warp=False)
    assert (alone.barrier, together.barrier) == ("__syncwarp()", "__syncthreads()")
    assert alone.buffer("k_tiles", "D") == "k_tiles + (stage * BLOCK_N + warp * WARP_N) * D"
    assert together.buffer("k_tiles", "D") == "k_tiles + stage * BLOCK_N * D"
    assert SharedTiles(layout=layout("causal_gqa"), by_warp=True).end == "k_tiles"
