"""How a Hopper kernel lies on the machine: buffers, and registers of each role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from attnc.plan.ir import Forward
from attnc.plan.sm90 import layout_of
from attnc.plan.sm90.layout import (
    FEWEST_REGISTERS,
    cut_products,
    entry_registers,
    registers_left,
    widest_product,
)
from attnc.plan.sm90.roles import plan_roles
from attnc.target.files import render_files
from tests.plan.hopper import planned


@pytest.mark.parametrize("consumers", [2, 3, 4])
def test_registers_of_both_roles_are_those_that_the_launch_holds(consumers: int) -> None:
    """setmaxnreg would wait for ever for more."""
    held = entry_registers(consumers)
    assert held * 128 * (consumers + 1) <= 65536
    for registers in range(held // 8 * 8, 241, 8):
        left = registers_left(consumers, registers)
        if left >= FEWEST_REGISTERS:
            assert left + consumers * registers <= held * (consumers + 1)
            assert left % 8 == 0


@pytest.mark.parametrize(
    ("consumers", "other_warpgroups", "widest"),
    [(2, 1, 256), (3, 1, 192), (4, 1, 128), (2, 2, 192), (4, 2, 96)],
)
def test_the_result_of_a_product_fits_what_a_thread_starts_with(
    consumers: int, other_warpgroups: int, widest: int
) -> None:
    """ptxas says so (C7602) of one that is 16 columns wider."""
    assert widest_product(entry_registers(consumers, other_warpgroups)) == widest


def test_a_load_with_an_end_of_its_own_has_room_of_its_own() -> None:
    """One comparison wants the number brought near, the other as it is: two values of each key."""
    mask = "q_idx <= at[kv_idx, b] + 3 and at[kv_idx, b] <= 4 * q_idx * H"
    module = planned("consumers = 2, tile.kv = 32", mask=mask, inputs=("at: i32[N, B]",))
    kernel = module.kernel
    assert layout_of(kernel).vectors == len(kernel.step.masked_fetches) == 2
    assert render_files(module, path="a.attn", sha256="")
    small, forward = replace(layout_of(kernel), vectors=1), cast(Forward, kernel)
    with pytest.raises(ValueError, match="laid out for 1 values of keys and 0 columns"):
        plan_roles(forward, small, module.variant)


def test_buffers_are_doubled_as_far_as_they_fit() -> None:
    def shape(schedule: str, **options: Any) -> tuple[int, int]:
        kernel = planned(schedule, **options).kernel
        found = layout_of(kernel).shape(kernel.configs[0])
        return found.q_tiles, found.o_tiles

    assert shape("tile.kv = 128", d=128) == (2, 1)
    assert shape("tile.kv = 144", d=128) == (2, 0)
    assert shape("tile.kv = 80", d=256) == (1, 0)


def test_o_leaves_through_q_or_v_where_it_has_no_room() -> None:
    def way(schedule: str, **options: Any) -> str:
        kernel = planned(schedule, **options).kernel
        return layout_of(kernel).way_out(kernel.configs[0])

    assert way("tile.kv = 128", d=128) == "tile"
    assert way("tile.kv = 144", d=128) == "q"
    assert way("consumers = 3, tile.kv = 64, stages = 4", d=128) == "q"
    assert way("tile.kv = 80", d=256) == "v"
    assert way("tile.kv = 16, stages = 8", d=256) == ""


@pytest.mark.parametrize(
    ("columns", "widest", "products"),
    [(256, 256, ((0, 256),)), (256, 200, ((0, 192), (192, 64))), (96, 64, ((0, 64), (64, 32)))],
)
def test_sums_are_cut_into_products_of_whole_pieces(
    columns: int, widest: int, products: tuple[tuple[int, int], ...]
) -> None:
    assert cut_products(columns, widest) == products


@pytest.mark.parametrize("words", ["", "order = longest_first", "consumers = 2, tile.kv = 32"])
@pytest.mark.parametrize("stages", [2, 3])
def test_each_buffer_has_a_barrier_for_full_and_one_for_empty(words: str, stages: int) -> None:
    module = planned(", ".join(filter(None, (words, f"stages = {stages}"))))
    layout = layout_of(cast(Forward, module.kernel))
    for config in module.kernel.configs:
        counts, tiles = layout.barriers(config), layout.shape(config).q_tiles
        assert (counts["k"], counts["v"], counts["q"]) == (2 * stages, 2 * stages, 2 * tiles)
        assert counts["query tiles"] == 4 + config.longest_first
        assert counts.get("o", 0) == (layout.way_out(config) == "v")
        assert 8 * sum(counts.values()) <= layout.shared_memory(config)["barriers"]
