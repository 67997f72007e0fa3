"""Bugs planted where blocks share a walk over queries: which part of it each has, where its sums lie, and how
they are added.
"""

from __future__ import annotations

from tests.planted.bug import HopperBug

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="the last part left out",
        attention="hopper_backward",
        file="backward_join",
        story="the last part was shorter than the others, and its sums were thought to be in the one before",
        anchor="part < count; ++part",
        patch="part < count - 1; ++part",
    ),
    HopperBug(
        name="the first part twice",
        attention="hopper_backward",
        file="backward_join",
        story="the first sum was read ahead of the loop, and the loop began with it",
        anchor="add_parts<D>(total,",
        patch="add_parts<D>(total, args.dk_sum_ptr + row * args.WALK_PARTS * D + column, 1); "
        "add_parts<D>(total,",
    ),
    HopperBug(
        name="heads of the next KV head in the last part",
        attention="hopper_backward",
        file="backward_dkdv",
        story="parts had as many heads each where this was measured",
        anchor="work.h_last = min(h + part_heads, h_kv * G + G) - 1;",
        patch="work.h_last = h + part_heads - 1;",
    ),
    HopperBug(
        name="tiles of queries that no part has",
        attention="hopper_between",
        file="backward_dkdv",
        story="each part had q_tiles / parts tiles, rounded down",
        anchor="q_tiles * (share + 1) / tile_parts",
        patch="q_tiles / tile_parts * (share + 1)",
    ),
    HopperBug(
        name="a tile of queries in two parts",
        attention="hopper_between",
        file="backward_dkdv",
        story="the first tile of a part was rounded down, and the last one of the part before up",
        anchor="(q_first + q_tiles * (share + 1) / tile_parts)",
        patch="(q_first + (q_tiles * (share + 1) + tile_parts - 1) / tile_parts)",
    ),
    HopperBug(
        name="all parts at one place",
        attention="hopper_backward",
        file="backward_dkdv",
        story="the parts of one tile are made by blocks that do not run at the same time, most often",
        anchor="+ part * D + 2 * t",
        patch="+ 2 * t",
    ),
    HopperBug(
        name="no sums of a part that sees no query",
        attention="hopper_ordered",
        file="backward_dkdv",
        story="nothing is added, but what lies there is read all the same",
        anchor="} if constexpr (IN_PARTS) { // dv of this part alone.",
        patch="} if (IN_PARTS && lo < hi) {",
    ),
    HopperBug(
        name="dk of parts without the scale",
        attention="hopper_wide",
        file="backward_join",
        story="the scale was a factor where one block rounds dk",
        anchor="pack(total[0] * NUMBERf,",
        patch="pack(total[0],",
    ),
)
