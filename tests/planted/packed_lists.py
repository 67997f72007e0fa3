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
)
