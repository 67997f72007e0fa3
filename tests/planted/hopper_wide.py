"""Bugs planted in Hopper's gradients of wide heads, where dO and V come in pieces."""

from __future__ import annotations

from tests.planted.bug import HopperBug

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="a piece of dO given back before it is multiplied",
        attention="hopper_pieces",
        file="backward_dk",
        story="a wait counted the product behind it, too",
        anchor="wgmma_wait<1>();",
        patch="wgmma_wait<2>();",
    ),
    HopperBug(
        name="every piece of V by the first columns of dO",
        attention="hopper_pieces",
        file="backward_dq",
        story="a tile of dO had as many columns as a piece once",
        anchor="do_rows + panel * TILE_ROWS * 128 / 16",
        patch="do_rows + panel / V_PANELS * TILE_ROWS * 128 / 16",
    ),
    HopperBug(
        name="p overwritten before it is read",
        attention="hopper_pieces",
        file="backward_dv",
        story="in other kernels ds comes back, which says that p was read",
        anchor="mbarrier_wait(barrier_of(base, P_EMPTY, 0), parity ^ 1);",
        patch="",
    ),
    HopperBug(
        name="second columns of dv over the first",
        attention="hopper_pieces",
        file="backward_dv",
        story="both consumers stored from the first column on",
        anchor="args.stride_dvn + 64 * FIRST_PANELS;",
        patch="args.stride_dvn;",
    ),
)
