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
        name="dq stored as far as whole depths",
        attention="hopper_columns",
        file="backward_dq",
        story="pairs of pieces left together",
        anchor="(const float (&)[72 / 8][4])dq",
        patch="(const float (&)[64 / 8][4])dq",
    ),
    HopperBug(
        name="dk stored as far as whole depths",
        attention="hopper_columns",
        file="backward_dkdv",
        story="pairs of pieces go to shared memory together",
        anchor="for (int j = 0; j < D / 8; j += 2) stmatrix_x4",
        patch="for (int j = 0; j < 72 / 16 * 2; j += 2) stmatrix_x4",
    ),
    HopperBug(
        name="o stored as far as whole depths",
        attention="hopper_columns_packed",
        story="TMA stores the rows that are not at the end of a sequence, as wide as they are",
        anchor="j < 40 / 8; ++j) if (exists)",
        patch="j < 40 / 16 * 2; ++j) if (exists)",
    ),
    HopperBug(
        name="columns behind a row copied",
        attention="hopper_columns_rows",
        story="q has zeros there, but 0 * NaN is NaN",
        anchor="from != 0 && column_of(panel) + 8 * chunk < COLUMNS",
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
        anchor="if (64 * panel + 8 * chunk < 72)",
        patch="if (64 * panel + 8 * chunk < D)",
    ),
    HopperBug(
        name="decoded o stored as far as whole depths",
        attention="hopper_columns_decode",
        story="splits leave pairs of pieces",
        anchor="j < 40 / 8; ++j) if (exists)",
        patch="j < 40 / 16 * 2; ++j) if (exists)",
    ),
    HopperBug(
        name="joined o stored as far as whole depths",
        attention="hopper_columns_decode",
        story="a thread has columns of two pieces, and stored both or none",
        anchor="o[0] = pack(acc[0] * scale, acc[1] * scale);",
        patch="if (column / 16 * 16 + 8 < 40) o[0] = pack(acc[0] * scale, acc[1] * scale);",
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
