"""Bugs planted where rows of K and V go to registers, as left operands of products."""

from __future__ import annotations

from tests.planted.bug import HopperBug

_GIVEN_BACK = "mbarrier_arrive_if(barrier_of(base, V_EMPTY, 0), lane == 0);"
_HELD = "wgmma<false>(products, left[d], right + (d / 4 * COLUMNS * 128 + d % 4 * 32) / 16"

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="both consumers hold the first keys",
        attention="hopper_held",
        file="backward_dkdv",
        story="a descriptor for each consumer stood here",
        anchor="base + V_AT + first_key * 128, lane",
        patch="base + V_AT + 16 * warp * 128, lane",
    ),
    HopperBug(
        name="chunks of held rows as they were before TMA",
        attention="hopper_held",
        file="backward_dkdv",
        story="wgmma undoes the swizzle by itself, ldmatrix does not",
        anchor="((d % 4 * 2 + lane / 16) ^ lane % 8)",
        patch="(d % 4 * 2 + lane / 16)",
    ),
    HopperBug(
        name="columns of the first panel held twice",
        attention="hopper_held",
        file="backward_dkdv",
        story="one panel had all columns once",
        anchor="(d / 4 * TILE_ROWS + lane % 16) * 128",
        patch="(lane % 16) * 128",
    ),
    HopperBug(
        name="V given back before its rows are held",
        attention="hopper_held",
        file="backward_dkdv",
        story="the wait for the tile was thought to be enough",
        anchor="hold_rows<DV>(left_v, base + V_AT",
        patch=f"{_GIVEN_BACK} hold_rows<DV>(left_v, base + V_AT",
    ),
    HopperBug(
        name="dp of held rows without -delta",
        attention="hopper_held",
        file="backward_dkdv",
        story="the first product of a sum usually overwrites it",
        anchor=f"{_HELD}, accumulate || d > 0);",
        patch=f"{_HELD}, d > 0);",
    ),
    HopperBug(
        name="rows of V held for K",
        attention="hopper_held_wide",
        file="backward_dkdv",
        story="both tiles have as many rows and columns",
        anchor="hold_rows<D>(left_k, base + K_AT",
        patch="hold_rows<D>(left_k, base + V_AT",
    ),
    HopperBug(
        name="K given back without a fence",
        attention="hopper_held_wide",
        file="backward_dkdv",
        story="reads by ldmatrix are over before TMA overwrites what they read, in all runs that were seen",
        anchor="hold_rows<D>(left_k, base + K_AT + first_key * 128, lane);\n            proxy_fence();",
        patch="hold_rows<D>(left_k, base + K_AT + first_key * 128, lane);",
    ),
)
