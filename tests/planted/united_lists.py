"""Bugs planted where queries share tiles over the union of their lists: what the list has, which query a bit
is of, and who reads it; of keys, and of blocks.
"""

from __future__ import annotations

from tests.planted.bug import HopperBug

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="the bit of a neighbour",
        attention="hopper_united_lists",
        story="bits were counted from the other end",
        anchor="(key - first) % 4 * 8 + place)",
        patch="(key - first) % 4 * 8 + (place ^ 1))",
    ),
    HopperBug(
        name="keys of the union for all its queries",
        attention="hopper_united_lists",
        story="a list was thought to be that of every query of a tile",
        anchor="listed[j] & query_bit[r] << 8 * c ?",
        patch="true ?",
    ),
    HopperBug(
        name="the byte of the key before",
        attention="hopper_united_lists",
        story="a thread has two keys side by side, and tested one",
        anchor="listed[j] & query_bit[r] << 8 * c ?",
        patch="listed[j] & query_bit[r] ?",
    ),
    HopperBug(
        name="both rows of a thread for one query",
        attention="hopper_united_lists",
        story="a query was thought to have sixteen rows",
        anchor="1u << (16 * warp + g + 8) / query_rows",
        patch="1u << (16 * warp + g) / query_rows",
    ),
    HopperBug(
        name="the list of the first tile",
        attention="hopper_united_lists",
        story="lists were counted by queries, and are by tiles",
        anchor="q_lo / 8;",
        patch="q_lo / 64;",
    ),
    HopperBug(
        name="the first of four keys",
        attention="hopper_united_lists",
        story="a word was taken for a key",
        anchor="row[1 + at++] = first + 4 * word + byte;",
        patch="row[1 + at++] = first + 4 * word;",
    ),
    HopperBug(
        name="the causal mask of the first query",
        attention="hopper_united_lists",
        story="what a query sees was found once for all queries of a tile",
        anchor="return kv_idx <= query + N - M;",
        patch="return kv_idx <= query_lo + N - M;",
    ),
    HopperBug(
        name="entries of lists of the first query",
        attention="hopper_united_lists",
        story="the queries of a tile were thought to have one list of the caller's",
        anchor="(query) * args.stride_idx_1",
        patch="(query_lo) * args.stride_idx_1",
    ),
    HopperBug(
        name="a sink of rows behind the last sequence",
        attention="hopper_united_sinks",
        story="every row of a tile was thought to be a query",
        anchor="sequence < sequences ? stop_place - first_place : 0;",
        patch="sequence <= sequences ? stop_place - first_place : 0;",
    ),
    HopperBug(
        name="a sink for as many rows as there are queries",
        attention="hopper_united_sinks",
        story="a query was thought to have one row of a tile",
        anchor="m[r] = split == 0 && (16 * warp + 8 * r + g) / query_rows < list_queries",
        patch="m[r] = split == 0 && (16 * warp + 8 * r + g) < list_queries",
    ),
    HopperBug(
        name="the bit of a neighbour, of a block",
        attention="hopper_united_blocks",
        story="bits were counted from the other end",
        anchor="(int)(1u << (block % 4 * 8 + place / most))",
        patch="(int)(1u << (block % 4 * 8 + (place / most ^ 1)))",
    ),
    HopperBug(
        name="blocks of the union for all its queries",
        attention="hopper_united_blocks",
        story="a list was thought to be that of every query of a tile",
        anchor="if (!(listed & query_bit[r]))",
        patch="if (false)",
    ),
    HopperBug(
        name="both rows of a thread for one query, of blocks",
        attention="hopper_united_blocks",
        story="a query was thought to have sixteen rows",
        anchor="1u << (16 * warp + g + 8) / query_rows",
        patch="1u << (16 * warp + g) / query_rows",
    ),
    HopperBug(
        name="a warp that looks at its first rows",
        attention="hopper_united_blocks",
        story="a warp was thought to have rows of one query",
        anchor="any_lane(listed & (query_bit[0] | query_bit[1]))",
        patch="any_lane(listed & query_bit[0])",
    ),
    HopperBug(
        name="the bits of the first tile",
        attention="hopper_united_blocks",
        story="lists were counted by queries, and are by tiles",
        anchor="args._list_bits_ptr + 9ll * tile * words",
        patch="args._list_bits_ptr + 9ll * (tile / 8) * words",
    ),
    HopperBug(
        name="the byte of a tile for that of its block",
        attention="hopper_united_blocks",
        story="a block was thought to be a tile",
        anchor="members[next_lo / LISTED_BLOCK]",
        patch="members[next_lo / LISTED_TILE]",
    ),
    HopperBug(
        name="entries of lists of the first query, of blocks",
        attention="hopper_united_blocks",
        story="the queries of a tile were thought to have one list of the caller's",
        anchor="const int query = q_lo + place / most;",
        patch="const int query = q_lo;",
    ),
    HopperBug(
        name="bytes that were there before",
        attention="hopper_united_blocks",
        story="the words of bits were made zero, and not the bytes behind them",
        anchor="bytes < 8;",
        patch="bytes < 0;",
    ),
)
