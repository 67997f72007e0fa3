"""Bugs planted in Hopper's kernels where warpgroups take turns at issuing products. What they compute stays
right: a turn that is never given is a deadlock, on a GPU too, and one that nobody takes shows at the end of a
block.
"""

from __future__ import annotations

from tests.planted.bug import HopperBug, Place

_PASS = "named_barrier_arrive(TURN_BARRIER + (consumer + 1) % CONSUMERS, TURN_THREADS);"

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="turn kept at the end of a tile",
        attention="hopper_turns",
        story="the last product is not one of the loop, and its turn was not passed on",
        anchor="wgmma_fence(); issue_pv(accumulate); turn_arrive(); } else {",
        patch="wgmma_fence(); issue_pv(accumulate); } else {",
    ),
    HopperBug(
        name="first turn never given",
        attention="hopper_turns",
        story="who is first has nobody before it who passes a turn on",
        anchor="if (consumer == CONSUMERS - 1) turn_arrive();",
        patch="",
    ),
    HopperBug(
        name="last turn never taken",
        attention="hopper_turns",
        story="a block ended in the middle of a meeting",
        anchor="if (consumer == 0) turn_wait();",
        patch="",
    ),
    HopperBug(
        name="turn of the last warpgroup passed on to nobody",
        attention="hopper_turns",
        story="written for two warpgroups, of which the other one is next",
        anchor=_PASS,
        patch="named_barrier_arrive(TURN_BARRIER + consumer + 1, TURN_THREADS);",
    ),
    HopperBug(
        name="turn passed on to the warpgroup before",
        attention="hopper_turns",
        story="between two warpgroups both ways round are the same",
        anchor=_PASS,
        patch="named_barrier_arrive(TURN_BARRIER + (consumer + CONSUMERS - 1) % CONSUMERS, TURN_THREADS);",
    ),
    HopperBug(
        name="turn of fewer threads",
        attention="hopper_turns",
        story="only those who arrive were counted",
        anchor=_PASS,
        patch="named_barrier_arrive(TURN_BARRIER + (consumer + 1) % CONSUMERS, 128);",
    ),
    HopperBug(
        name="turn of all who multiply",
        attention="hopper_turns",
        story="a turn was said to be of all warpgroups, and two of them come",
        anchor="TURN_THREADS = NUMBER;",
        patch="TURN_THREADS = 128 * CONSUMERS;",
    ),
    HopperBug(
        name="turn passed on by one warp",
        attention="hopper_turns",
        story="mbarriers are arrived at by one for all",
        anchor=_PASS,
        patch=f"if (warp == 0) {_PASS}",
    ),
    HopperBug(
        name="turn passed on twice",
        attention="hopper_turns",
        story="behind each product, as if each had a turn",
        anchor="issue_qk(); issue_pv(accumulate); turn_arrive();",
        patch="issue_qk(); turn_arrive(); issue_pv(accumulate); turn_arrive();",
    ),
    HopperBug(
        name="turn taken by warpgroups that see the tile alone",
        attention="hopper_turns",
        story="rows that see none of the keys of a tile need not multiply it",
        anchor="(PINGPONG ? 0 : 64 * part)",
        patch="64 * part",
        also=(Place(anchor="(PINGPONG ? BLOCK_M : 64)", patch="64"),),
    ),
)
