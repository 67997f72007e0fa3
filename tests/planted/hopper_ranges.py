"""Bugs planted in Hopper's kernels where each warpgroup walks over the key tiles that its own rows see, and o
leaves through Q.
"""

from __future__ import annotations

from tests.planted.bug import HopperBug

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="keys of others kept",
        attention="hopper_ranges",
        story="a warpgroup that does not read a tile has nothing to give back, it was thought: it hangs",
        anchor="__syncwarp(); release_k(false);",
        patch="k.advance();",
    ),
    HopperBug(
        name="keys of others given back before they are there",
        attention="hopper_ranges",
        story="who does not read a tile need not wait for it: but arrivals then end the phase before",
        anchor="mbarrier_wait(barrier_of(base, K_FULL, k.index), k.phase); __syncwarp(); release_k(false);",
        patch="release_k(false);",
    ),
    HopperBug(
        name="values of others given back before they are there",
        attention="hopper_ranges",
        story="the same for values",
        anchor="mbarrier_wait(barrier_of(base, V_FULL, v.index), v.phase); __syncwarp(); release_v();",
        patch="release_v();",
    ),
    HopperBug(
        name="keys of others given back while lanes wait for them",
        attention="hopper_ranges",
        story="one lane arrives for its warp, and the others found the next phase but one",
        anchor="mbarrier_wait(barrier_of(base, K_FULL, k.index), k.phase); __syncwarp(); release_k(false);",
        patch="mbarrier_wait(barrier_of(base, K_FULL, k.index), k.phase); release_k(false);",
    ),
    HopperBug(
        name="tiles in front of a range not passed",
        attention="hopper_ranges",
        story="written for a window, whose last tile all rows of a small tile of queries see",
        anchor="skip_tiles((uniform(work.kv_lo) - kv_lo) / BLOCK_N);",
        patch="",
    ),
    HopperBug(
        name="tiles behind a range not passed",
        attention="hopper_ranges",
        story="written for a causal mask, whose ranges all begin at the first key",
        anchor="skip_tiles((lo - uniform(work.first_tile)) / BLOCK_N);",
        patch="",
    ),
    HopperBug(
        name="late values forgotten",
        attention="hopper_ranges",
        story="values were given back late, and the next tile's were waited for as if they were next",
        anchor="while (skipped_v > 0) skip_v();",
        patch="",
    ),
    HopperBug(
        name="Q given back while o leaves through it",
        attention="hopper_ranges",
        story="a store was over when it was issued",
        anchor="if (gives) tma_wait_read();",
        patch="",
    ),
    HopperBug(
        name="Q given back with the last K, and with o",
        attention="hopper_ranges",
        story="o had had a tile of its own",
        anchor="!O_THROUGH_Q && last && lane == 0",
        patch="last && lane == 0",
    ),
    HopperBug(
        name="Q kept by rows that see nothing",
        attention="hopper_ranges",
        story="Q was given back behind the first product, and these rows have none",
        anchor="__syncwarp(); release_q();",
        patch="__syncwarp();",
    ),
    HopperBug(
        name="keys of the first warpgroup for all",
        attention="hopper_ranges",
        story="bounds were those of the first rows of the tile",
        anchor="q_lo = first_row + 64 * part;",
        patch="q_lo = first_row;",
    ),
    HopperBug(
        name="keys of the first warpgroup copied for all",
        attention="hopper_ranges",
        story="the hull was that of one part of the lanes",
        anchor="last_tile = warp_max(sees ? own : -BLOCK_N);",
        patch="last_tile = uniform(sees ? own : -BLOCK_N);",
    ),
)
