"""Bugs planted where Hopper's o leaves through the tiles of V."""

from __future__ import annotations

from tests.planted.bug import HopperBug

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="V given back while o leaves through it",
        attention="hopper_out",
        story="a store was over when it was issued",
        anchor="if (gives) tma_wait_read();",
        patch="",
    ),
    HopperBug(
        name="V copied over o",
        attention="hopper_out",
        story="a tile of V was free when its values had been read",
        anchor="if (v_lo >= 0) { await_o();",
        patch="if (v_lo >= 0) {",
    ),
    HopperBug(
        name="o over values that others still read",
        attention="hopper_out",
        story="a warpgroup asked whether its own product was done",
        anchor="mbarrier_wait(barrier_of(base, V_EMPTY, part.index), part.phase ^ 1);",
        patch="",
    ),
    HopperBug(
        name="o waits with the parity of who reads",
        attention="hopper_out",
        story="whoever waits until a tile is free begins with the other parity, also one that multiplies",
        anchor="mbarrier_wait(barrier_of(base, V_EMPTY, part.index), part.phase ^ 1);",
        patch="mbarrier_wait(barrier_of(base, V_EMPTY, part.index), part.phase);",
    ),
    HopperBug(
        name="all parts of o through one tile of V",
        attention="hopper_out",
        story="a tile of V held all of o once",
        anchor="const u32 o_at = base + V_AT + part.index * V_BYTES;",
        patch="const u32 o_at = base + V_AT + v.index * V_BYTES;",
    ),
    HopperBug(
        name="no proxy fence in front of o's parts",
        attention="hopper_out",
        story="the fence stood behind the loop, for one store of all",
        anchor="proxy_fence(); __syncwarp(); if (lane == 0) {",
        patch="__syncwarp(); if (lane == 0) {",
    ),
    HopperBug(
        name="o of rows without keys not waited for",
        attention="hopper_out",
        story="no values are copied for them, so nothing was asked; a phase later it was too late",
        anchor="await_o(); continue;",
        patch="continue;",
    ),
    HopperBug(
        name="o of rows without keys kept",
        attention="hopper_out",
        story="it was given back behind the first product, and these rows have none",
        anchor="__syncwarp(); release_o();",
        patch="__syncwarp();",
    ),
)
