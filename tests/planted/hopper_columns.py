"""Bugs planted where products on Hopper have more columns than rows do."""

from __future__ import annotations

from tests.planted.bug import HopperBug, Place

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="scores of whole depths alone",
        attention="hopper_columns",
        story="all head dimensions were multiples of 16",
        anchor="for (int d = 0; d < D / 16; ++d)",
        patch="for (int d = 0; d < 72 / 16; ++d)",
    ),
    HopperBug(
        name="s and dp of whole depths alone",
        attention="hopper_columns",
        file="backward_dq",
        story="all head dimensions were multiples of 16",
        anchor="for (int d = 0; d < DEPTH / 16; ++d)",
        patch="for (int d = 0; d < (DEPTH - 8) / 16; ++d)",
    ),
    HopperBug(
        name="dq stored as wide as it is summed",
        attention="hopper_columns",
        file="backward_dq",
        story="all that a thread has of a row was stored",
        anchor="(const float (&)[72 / 8][4])dq",
        patch="dq",
    ),
    HopperBug(
        name="dk stored as wide as it is summed",
        attention="hopper_columns_packed",
        file="backward_dkdv",
        story="a row had as many chunks as its sums",
        anchor="i / (72 / 8), chunk = i % (72 / 8);",
        patch="i / (D / 8), chunk = i % (D / 8);",
    ),
    HopperBug(
        name="o stored as wide as it is summed",
        attention="hopper_columns_packed",
        story="TMA drops what is past the last column, and rows at the end of a sequence are not its",
        anchor="j < 40 / 8; ++j) if (exists)",
        patch="j < DV / 8; ++j) if (exists)",
    ),
    HopperBug(
        name="columns behind a row copied",
        attention="hopper_columns_rows",
        story="q has zeros there, but 0 * NaN is NaN",
        anchor="from != 0 && column_of(piece) + 8 * chunk < COLUMNS",
        patch="from != 0",
    ),
    HopperBug(
        name="columns behind a row left as they were",
        attention="hopper_columns_rows",
        story="what no row has was not written",
        anchor="8 * chunk < (COLUMNS + 15) / 16 * 16",
        patch="8 * chunk < COLUMNS",
    ),
    HopperBug(
        name="columns of decoded queries behind a row loaded",
        attention="hopper_columns_decode",
        story="as many as are multiplied",
        anchor="if (64 * piece + 8 * chunk < 72)",
        patch="if (64 * piece + 8 * chunk < D)",
    ),
    HopperBug(
        name="decoded o stored as wide as it is summed",
        attention="hopper_columns_decode",
        story="all that a warpgroup has was stored",
        anchor="j < 40 / 8; ++j) if (exists)",
        patch="j < COLUMNS / 8; ++j) if (exists)",
    ),
    HopperBug(
        name="joined o stored as wide as it is summed",
        attention="hopper_columns_decode",
        story="splits have all columns, and a thread those of two pieces",
        anchor="if (column / 16 * 16 + 8 < 40) o[4]",
        patch="o[4]",
    ),
    HopperBug(
        name="columns that are in no value multiplied as whole pieces",
        attention="hopper_columns_latent",
        story="beside 512 columns of values there were 64 others, a piece",
        anchor="u32 q_rest[(D - DV) / 16][4]; #pragma unroll for (int d = 0; d < (D - DV) / 16; ++d)",
        patch="u32 q_rest[4][4];\n#pragma unroll\nfor (int d = 0; d < 4; ++d)",
        also=(
            Place(
                anchor="for (int d = 0; d < (D - DV) / 16; ++d) wgmma<false>",
                patch="for (int d = 0; d < 4; ++d) wgmma<false>",
            ),
        ),
    ),
)
