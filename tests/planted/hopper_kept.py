"""Bugs planted in how Hopper's kernels keep ds in memory, and make dq of it: where a tile lies, in which
round, and how its fragments are turned around.
"""

from __future__ import annotations

from tests.planted.bug import HopperBug, Place

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="ds at the place of the next block",
        attention="hopper_lists",
        file="backward_dkdv",
        story="a block was counted among those before it",
        anchor="count_before(list, kv_lo / 128)",
        patch="min(count_before(list, kv_lo / 128 + 1), args.LIST_TILES - 1)",
    ),
    HopperBug(
        name="heads of a round from its other end",
        attention="hopper_lists",
        file="backward_dkdv",
        story="one kernel numbered heads as it takes them, and the other from the last",
        anchor="(long long)(b * H + h - args.FIRST_HEAD) *",
        patch="(long long)(args.FIRST_HEAD + args.ROUND_HEADS - 1 - b * H - h) *",
    ),
    HopperBug(
        name="a fragment that is not turned around",
        attention="hopper_lists",
        file="backward_dq_kept",
        story="one of four registers was forgotten",
        anchor="left_ds[n][2] = turned(x.words[1]);",
        patch="left_ds[n][2] = x.words[1];",
    ),
    HopperBug(
        name="quarters of a fragment in their old places",
        attention="hopper_lists",
        file="backward_dq_kept",
        story="each quarter was turned around, and the fragment was not",
        anchor="left_ds[n][1] = turned(x.words[2]);",
        patch="left_ds[n][1] = turned(x.words[1]);",
        also=(
            Place(
                file="backward_dq_kept",
                anchor="left_ds[n][2] = turned(x.words[1]);",
                patch="left_ds[n][2] = turned(x.words[2]);",
            ),
        ),
    ),
    HopperBug(
        name="ds overwritten while it is read",
        attention="hopper_lists",
        file="backward_dq_kept",
        story="what threads read was thought to be over when they arrive at a barrier",
        anchor="proxy_fence(); // the next copy overwrites what was read",
        patch="",
    ),
    HopperBug(
        name="ds of keys that the mask hides",
        attention="block_sparse",
        file="backward_dq_kept",
        story="ds of a masked pair was thought to be 0 wherever it lies",
        anchor="left_ds[j / 2][j % 2 * 2 + r] &= c ? 0x0000ffff : 0xffff0000;",
        patch="{}",
    ),
)
