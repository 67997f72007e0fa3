"""Bugs planted in how kernels find the blocks in which a mask keeps a pair."""

from __future__ import annotations

from tests.planted.bug import Bug, HopperBug, TritonBug

_TRITON: tuple[Bug, ...] = (
    TritonBug(
        name="all queries but the last of a block",
        attention="kept_blocks",
        story="the last query was thought to be the one behind",
        anchor="stop = tl.where(seen, last_query + 1, first_query)",
        patch="stop = tl.where(seen, last_query, first_query)",
    ),
    TritonBug(
        name="pairs of the last queries alone",
        attention="kept_blocks",
        story="each query's pairs were noted in place of those before it",
        anchor="any_kept = tl.maximum(any_kept, tl.max(keep.to(tl.int32), 0))",
        patch="any_kept = tl.max(keep.to(tl.int32), 0)",
    ),
    TritonBug(
        name="the blocks of the first sequence",
        attention="kept_blocks",
        story="data was thought to be the same in all sequences",
        anchor="c_row = c_ptr + b.to(tl.int64) * stride_c_0 kept = tl.zeros([], tl.int32)",
        patch="c_row = c_ptr\n    kept = tl.zeros([], tl.int32)",
    ),
    TritonBug(
        name="the bits of the first list",
        attention="kept_blocks",
        story="words were stored without the place of their list",
        anchor="at = _list_bits_ptr + line.to(tl.int64) * words + word tl.store",
        patch="at = _list_bits_ptr + word\n    tl.store",
    ),
    TritonBug(
        name="blocks of four under one bit",
        attention="kept_blocks",
        story="bits were shifted by the blocks before, and not by their own place",
        anchor="kept += tl.sum(blocks << (part + tl.arange(0, 4)), 0)",
        patch="kept = kept | (tl.max(blocks, 0) << part)",
    ),
    TritonBug(
        name="the list of the first queries",
        attention="kept_blocks",
        story="all queries were thought to have the bits of the first",
        anchor="at = _list_bits_ptr + line.to(tl.int64) * words + block // 32",
        patch="at = _list_bits_ptr + block // 32",
    ),
)
_HOPPER: tuple[Bug, ...] = (
    HopperBug(
        name="every other 32 keys of a block",
        attention="kept_blocks",
        story="a warp was thought to have a key in each half of its lanes",
        anchor="key < stop && !any_kept; key += 32",
        patch="key < stop && !any_kept; key += 64",
    ),
    HopperBug(
        name="the keys of a lane alone",
        attention="kept_blocks",
        story="the first lane said what the others had found",
        anchor="any_kept = any_lane(kept && kv_idx < N);",
        patch="any_kept = kept && kv_idx < N;",
    ),
    HopperBug(
        name="warps that take bits from each other",
        attention="kept_blocks",
        story="one warp was thought to find a word",
        anchor="atomicOr(found, (int)(1u << block % 32));",
        patch="*found = (int)(1u << block % 32);",
    ),
    HopperBug(
        name="a word that is stored before it is found",
        attention="kept_blocks",
        story="the first thread did not wait for other warps",
        anchor="__syncthreads(); if (threadIdx.x == 0) args._list_bits_ptr",
        patch="if (threadIdx.x == 0) args._list_bits_ptr",
    ),
    HopperBug(
        name="all queries but the last of a block",
        attention="kept_blocks",
        story="the last query was thought to be the one behind",
        anchor="query <= last_query; ++query",
        patch="query < last_query; ++query",
    ),
    HopperBug(
        name="the blocks of every fourth warp",
        attention="kept_blocks",
        story="a block of threads was thought to have blocks of its own",
        anchor="block < min(32 * word + 32, args.list_blocks); block += LIST_THREADS / 32",
        patch="block < min(32 * word + 2, args.list_blocks); block += LIST_THREADS / 32",
    ),
    HopperBug(
        name="the ends of the first warp's queries",
        attention="kept_times",
        story="the ends of warps were not joined",
        anchor="for (int other = 0; other < LIST_THREADS / 32; ++other) {",
        patch="for (int other = warp; other < 1; ++other) {",
    ),
)
BUGS: tuple[Bug, ...] = (*_TRITON, *_HOPPER)
