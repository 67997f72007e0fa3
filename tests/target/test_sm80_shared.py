"""Tiles in shared memory, and who copies them."""

from __future__ import annotations

import pytest

from attnc.plan.sm80 import layout_of
from attnc.plan.sm80.layout import CudaLayout
from attnc.target.sm80.shared import Copiers, SharedTiles
from tests.plans import module_of


def layout(spec: str) -> CudaLayout:
    return layout_of(module_of(spec, "cuda.sm_80").kernel)


@pytest.mark.parametrize(
    ("page", "by_warp", "of_queries", "of_keys"),
    [
        (0, False, "copy_rows", "copy_rows"),
        (0, True, "share_rows", "share_rows"),
        (16, False, "copy_rows", "copy_pages"),
        (16, True, "share_rows", "copy_pages"),
    ],
)
def test_rows_are_copied_by_who_shares_them_and_keys_in_pages_page_by_page(
    page: int, by_warp: bool, of_queries: str, of_keys: str
) -> None:
    tiles = SharedTiles(layout=layout("causal_gqa"), page=page, by_warp=by_warp)
    assert (tiles.of_queries, tiles.of_keys) == (of_queries, of_keys)


def test_values_that_are_columns_of_keys_lie_in_their_tiles() -> None:
    assert SharedTiles(layout=layout("odd_dims")).value == "DV"
    assert SharedTiles(layout=layout("mla_decode")).value == "D"


def test_warps_with_keys_of_their_own_copy_them_without_the_others() -> None:
    alone, together = Copiers(by_warp=True), Copiers(by_warp=False)
    assert (alone.barrier, together.barrier) == ("__syncwarp()", "__syncthreads()")
    assert alone.buffer("k_tiles", "D") == "k_tiles + (stage * BLOCK_N + warp * WARP_N) * D"
    assert together.buffer("k_tiles", "D") == "k_tiles + stage * BLOCK_N * D"
    assert SharedTiles(layout=layout("causal_gqa"), by_warp=True).end == "k_tiles"
