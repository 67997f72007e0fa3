"""The text of a Hopper forward kernel, where a plan changes it."""

from __future__ import annotations

import pytest

from attnc.target.files import render_files
from tests.plan.hopper import planned
from tests.plans import module_of


def test_warpgroups_have_key_tiles_of_their_own_where_one_may_not_see_a_tile() -> None:
    def kernel(schedule: str, mask: str) -> str:
        module = planned(schedule, mask=mask, d=64)
        return render_files(module, path="a.attn", sha256="")["default.cu"]

    apart = "int last_tile[CONSUMERS];"
    assert apart in kernel("consumers = 2, tile.kv = 64", "window(100, 0)")
    assert apart in kernel("consumers = 3, tile.kv = 128", "causal")
    assert apart not in kernel("consumers = 2, tile.kv = 128", "causal")
    assert apart not in kernel("consumers = 2, tile.kv = 64", "kv_idx < 100")


@pytest.mark.parametrize(
    ("choice", "asks", "side_by_side", "one_by_one"),
    [("= true", False, True, False), ("= false", False, False, True), ("in {true, false}", True, True, True)],
)
def test_a_kernel_has_only_the_orders_of_products_that_some_config_takes(
    choice: str, asks: bool, side_by_side: bool, one_by_one: bool
) -> None:
    module = planned(f"consumers = 2, tile.kv = 64, overlap {choice}")
    files = render_files(module, path="a.attn", sha256="")
    assert ("OVERLAP: int" in files["default.py"]) is asks
    assert ("if constexpr (OVERLAP)" in files["default.cu"]) is asks
    assert ("next_p(kind, kv_lo, finish_pv);" in files["default.cu"]) is side_by_side
    assert ("next_p(kind, kv_lo, [] {});" in files["default.cu"]) is one_by_one


def kernel_of(spec: str, variant: str | None = None) -> str:
    """The kernel of a committed spec."""
    module = module_of(spec, "cuda.sm_90a", variant)
    return render_files(module, path="a.attn", sha256="")[f"{module.variant.kernels}.cu"]


@pytest.mark.parametrize(
    ("spec", "variant", "first", "rows_that_see", "lanes"),
    [
        ("causal_gqa", "bf16_d128", "kv_lo < 0", "kv_lo < all_see_hi", ""),
        ("window", None, "kv_lo < work.first_tile", "max(kv_lo, ", ""),
        ("document", None, "kv_lo < work.first_tile", "", "#define LANES_SEARCH (32 / (BLOCK_M / 64))"),
    ],
)
def test_consumers_walk_from_the_last_tile_that_some_row_sees(
    spec: str, variant: str | None, first: str, rows_that_see: str, lanes: str
) -> None:
    text = kernel_of(spec, variant)
    assert f"if ({first}) {{" in text
    assert f"auto all_rows_see = [&](int kv_lo) {{ return {rows_that_see}" in text
    assert lanes in text
    assert ("LANES_SEARCH" in text) is bool(lanes)
