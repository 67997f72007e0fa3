"""Bugs planted in how kernels find the blocks in which a mask keeps a pair."""

from __future__ import annotations

from tests.planted.bug import Bug, HopperBug, TritonBug

_TRITON: tuple[Bug, ...] = (
    TritonBug(
        name="all queries but the last of a block",
        attention="kept_blocks",
        story="a step behind the last whole one was left out",
        anchor="while (start <= last_query) & ((any_kept == 0)",
        patch="while (start < last_query - 31) & ((any_kept == 0)",
    ),
    TritonBug(
        name="pairs of the first queries alone",
        attention="kept_blocks",
        story="a block was left once some of its queries had no pair",
        anchor="while (start <= last_query) & ((any_kept == 0) | (all_kept != 0)):",
        patch="while start <= first_query:",
    ),
    TritonBug(
        name="the blocks of the first sequence",
        attention="kept_blocks",
        story="data was thought to be the same in all sequences",
        anchor="c_row = c_ptr + b.to(tl.int64) * stride_c_0 lo = 0",
        patch="c_row = c_ptr\n    lo = 0",
    ),
    TritonBug(
        name="the bits of the first list",
        attention="kept_blocks",
        story="words were stored without the place of their list",
        anchor="at = _list_bits_ptr + 2 * line.to(tl.int64) * words + word tl.store",
        patch="at = _list_bits_ptr + word\n    tl.store",
    ),
    TritonBug(
        name="the first block alone",
        attention="kept_blocks",
        story="bits were not shifted to their places",
        anchor="to_try |= tl.sum((may & ~decided).to(tl.int32) << bit, 0)",
        patch="to_try |= tl.max((may & ~decided).to(tl.int32), 0)",
    ),
    TritonBug(
        name="the list of the first queries",
        attention="kept_blocks",
        story="all queries were thought to have the bits of the first",
        anchor="at = _list_bits_ptr + 2 * line.to(tl.int64) * words + block // 32",
        patch="at = _list_bits_ptr + block // 32",
    ),
    TritonBug(
        name="full where a pair is kept",
        attention="kept_blocks",
        story="blocks of which the mask keeps something were taken for full ones",
        anchor="full |= (any_kept & all_kept) << part",
        patch="full |= any_kept << part",
    ),
    TritonBug(
        name="decided without a look at all pairs",
        attention="kept_blocks",
        story="blocks with no kept pair of the first queries were left",
        anchor="to_try |= tl.sum((may & ~decided).to(tl.int32) << bit, 0)",
        patch="",
    ),
    TritonBug(
        name="full where no datum excludes a pair",
        attention="kept_runs",
        story="what positions exclude was forgotten",
        anchor="is_whole & (first_query + N - M >= last_key)",
        patch="is_whole",
    ),
    TritonBug(
        name="sure where ends touch",
        attention="kept_runs",
        story="the least of the queries was compared with the least of the keys",
        anchor="sure = may & ((least_2 >= most_3) & (most_0 <= least_1))",
        patch="sure = may & (least_2 >= most_3)",
    ),
    TritonBug(
        name="full blocks of keys that end short",
        attention="kept_times",
        story="keys past the end were taken for kept ones",
        anchor="& (last_key - first_key == 127)",
        patch="",
    ),
)
_HOPPER: tuple[Bug, ...] = (
    HopperBug(
        name="every other 32 keys of a block",
        attention="kept_blocks",
        story="a warp was thought to have a key in each half of its lanes",
        anchor="key < stop && (!any_kept || all_kept); key += 32",
        patch="key < stop && (!any_kept || all_kept); key += 64",
    ),
    HopperBug(
        name="the keys of a lane alone",
        attention="kept_blocks",
        story="the first lane said what the others had found",
        anchor="any_kept |= any_lane(keeps && kv_idx < stop);",
        patch="any_kept |= keeps && kv_idx < stop;",
    ),
    HopperBug(
        name="warps that take bits from each other",
        attention="kept_blocks",
        story="one warp was thought to find a word",
        anchor="atomicOr(found, bit);",
        patch="*found = bit;",
    ),
    HopperBug(
        name="a word that is stored before it is found",
        attention="kept_blocks",
        story="the first thread did not wait for other warps",
        anchor="__syncthreads(); if (threadIdx.x < 2) args._list_bits_ptr",
        patch="if (threadIdx.x < 2) args._list_bits_ptr",
    ),
    HopperBug(
        name="all queries but the last of a block",
        attention="kept_blocks",
        story="the last query was thought to be the one behind",
        anchor="query < min(at + 32, last_query + 1); ++query",
        patch="query < min(at + 32, last_query); ++query",
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
    HopperBug(
        name="full where a pair is kept",
        attention="kept_blocks",
        story="a pair that is not kept was forgotten",
        anchor="all_kept &= !any_lane(hides && kv_idx < stop);",
        patch="",
    ),
    HopperBug(
        name="full where no datum excludes a pair",
        attention="kept_runs",
        story="what positions exclude was forgotten",
        anchor="all_kept = is_whole && first_query + N - M >= last_key;",
        patch="all_kept = is_whole;",
    ),
    HopperBug(
        name="full blocks of keys that end short",
        attention="kept_times",
        story="keys past the end were taken for kept ones",
        anchor="&& last_key - first_key == 128 - 1;",
        patch=";",
    ),
    HopperBug(
        name="full blocks of the row before",
        attention="kept_runs",
        story="words of bits were counted without those of full blocks",
        anchor="(2ll * line + 1) * words",
        patch="(1ll * line + 1) * words",
    ),
)
BUGS: tuple[Bug, ...] = (*_TRITON, *_HOPPER)
