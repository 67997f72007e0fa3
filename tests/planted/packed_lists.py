"""Bugs planted in how packed queries walk over blocks that each lists, and blocks over those queries."""

from __future__ import annotations

from tests.planted.bug import TritonBug

BUGS: tuple[TritonBug, ...] = (
    TritonBug(
        name="the list of a row of the first sequence",
        attention="packed_blocks",
        story="lists were numbered within a sequence",
        anchor="(cu.to(tl.int64) + q_lo) * Hkv + h_kv",
        patch="q_lo.to(tl.int64) * Hkv + h_kv",
    ),
    TritonBug(
        name="no numbers for the ends of sequences",
        attention="packed_blocks",
        story="there was thought to be a program for each row alone",
        anchor="row_tiles = (T + B + 1) * head_tiles",
        patch="row_tiles = T * head_tiles",
    ),
    TritonBug(
        name="keys of the first sequence",
        attention="packed_blocks",
        story="blocks were counted from the first row of all keys",
        anchor="K += k_first.to(tl.int64) * stride_kn + h_kv.to(tl.int64) * stride_kh",
        patch="K += h_kv.to(tl.int64) * stride_kh",
    ),
    TritonBug(
        name="queries of sequences before that list the block",
        attention="packed_blocks",
        story="an inverted list was thought to be of one sequence",
        anchor="before = _entries_below(list_row + 1, listed, q_first)",
        patch="before = 0",
        phase="backward",
    ),
    TritonBug(
        name="as many rows as the sequence has, from the first one on",
        attention="packed_blocks",
        story="the end of a sequence was taken from its length",
        anchor="_entries_below(list_row + 1, listed, q_first + M) - before",
        patch="_entries_below(list_row + 1, listed, M) - before",
        phase="backward",
    ),
    TritonBug(
        name="the first query of a sequence skipped",
        attention="packed_blocks",
        story="a search found the entry behind a value, not the first that is no smaller",
        anchor="below = _list_entry(entries + middle) < value",
        patch="below = _list_entry(entries + middle) <= value",
    ),
    TritonBug(
        name="delta of the first sequence",
        attention="packed_blocks",
        story="rows of delta were counted within a sequence",
        anchor="rows = h.to(tl.int64) * T + q_first + q_idx",
        patch="rows = h.to(tl.int64) * T + q_idx",
        phase="backward",
    ),
    TritonBug(
        name="the list of a row of the first sequence, of single keys",
        attention="packed_tokens",
        story="lists were numbered within a sequence",
        anchor="-1, cu.to(tl.int64) + q_lo,",
        patch="-1, q_lo.to(tl.int64),",
    ),
    TritonBug(
        name="pages of the first sequence",
        attention="packed_tokens",
        story="there was thought to be one table",
        anchor="table_row = table_ptr + b.to(tl.int64) * stride_table_0",
        patch="table_row = table_ptr",
    ),
    TritonBug(
        name="listed keys past the end of the sequence",
        attention="packed_tokens",
        story="a list was thought to name keys of its own sequence alone",
        anchor="(kv_idx[None, :] < N) & (q_pos[:, None] - 50 <= kv_idx[None, :])",
        patch="(q_pos[:, None] - 50 <= kv_idx[None, :])",
    ),
)
