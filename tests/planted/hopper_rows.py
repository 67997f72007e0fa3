"""Bugs planted in copies of single rows on Hopper, of pages that hold no box of TMA."""

from __future__ import annotations

from tests.planted.bug import HopperBug

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="no fence between rows and the scores of their keys",
        attention="hopper_rows",
        story="boxes of TMA need none: they come through the proxy by which wgmma reads",
        anchor="< 0; mbarrier_wait(barrier_of(base, K_FULL, k.index), k.phase); proxy_fence();",
        patch="< 0; mbarrier_wait(barrier_of(base, K_FULL, k.index), k.phase);",
    ),
    HopperBug(
        name="no fence between rows and the last values",
        attention="hopper_rows",
        story="it stood in front of the products of a step, and the last one is behind the loop",
        anchor="proxy_fence(); wgmma_fence(); issue_pv(accumulate);",
        patch="wgmma_fence(); issue_pv(accumulate);",
    ),
    HopperBug(
        name="no fence between rows of values and their product",
        attention="hopper_rows_decode",
        story="the one for keys was thought to do for both",
        anchor="wait(1); proxy_fence();",
        patch="wait(1);",
    ),
    HopperBug(
        name="ready before its rows have landed",
        attention="hopper_rows",
        story="an arrival behind the copies, as behind ordinary stores",
        anchor="copies_arrive(barrier_of(base, V_FULL, v.index));",
        patch="mbarrier_arrive(barrier_of(base, V_FULL, v.index));",
    ),
    HopperBug(
        name="ready with the rows of one lane of each warp",
        attention="hopper_rows",
        story="warps had arrived by one lane",
        anchor="mbarrier_init(barrier_of(base, K_FULL, i), 32 * PRODUCERS);",
        patch="mbarrier_init(barrier_of(base, K_FULL, i), PRODUCERS);",
    ),
    HopperBug(
        name="rows behind the last key copied",
        attention="hopper_rows",
        story="their p is 0, but 0 * NaN is NaN, and nobody clears them",
        anchor="(int)kv_idx < N ? row_at : 0",
        patch="row_at",
    ),
    HopperBug(
        name="rows not swizzled",
        attention="hopper_rows",
        story="TMA had done so",
        anchor="(chunk ^ (row & 7)) * 16",
        patch="chunk * 16",
    ),
    HopperBug(
        name="rows of the tile before",
        attention="hopper_rows",
        story="pages were looked up for the tile at hand, and not for the next",
        anchor="page = pages_of(kv_lo);",
        patch="page = pages_of(v_lo);",
    ),
    HopperBug(
        name="values in the pages of the next keys",
        attention="hopper_rows",
        story="keys are copied a tile ahead, and their pages had been looked up for both",
        anchor=", v_page, v_lo, N, producer,",
        patch=", page, v_lo, N, producer,",
    ),
    HopperBug(
        name="pages of the first tile for all",
        attention="hopper_rows_decode",
        story="lanes have the pages of several tiles",
        anchor="shuffle(pages.of[0], (taken * 4 * FOURS + lane) % 32)",
        patch="shuffle(pages.of[0], lane)",
    ),
    HopperBug(
        name="first row of a page for all of them",
        attention="hopper_rows",
        story="a page of one key has no other",
        anchor="+ kv_idx % PAGE * pool.stride",
        patch="",
    ),
    HopperBug(
        name="rows written over those that are still read",
        attention="hopper_rows",
        story="who copies rows waits for none of them, and did not wait for room either",
        anchor="mbarrier_wait(barrier_of(base, K_EMPTY, k.index), k.phase);",
        patch="",
    ),
)
