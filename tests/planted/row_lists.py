"""Bugs planted in what makes lists of rows of memory of lists of keys: what a query sees of its list, and
where that lies.
"""

from __future__ import annotations

from tests.planted.bug import Bug, HopperBug, TritonBug

BUGS: tuple[Bug, ...] = (
    HopperBug(
        name="keys that the mask forbids kept",
        attention="hopper_row_lists",
        story="a list was thought to hold what its query sees",
        anchor="key - first < keys && keeps(key)",
        patch="key - first < keys",
    ),
    HopperBug(
        name="the causal mask of rows of memory",
        attention="hopper_row_lists",
        story="rows of memory were thought to be positions",
        anchor="return kv_idx <= query + N - M;",
        patch="return kv_idx <= query_row + N - M;",
    ),
    HopperBug(
        name="the first query with the sequence before",
        attention="hopper_row_lists",
        story="a search found the first end that is no smaller, not the first that is larger",
        anchor="upper_bound(args.cu_ptr, args.stride_cu_0, sequences + 1, query_row)",
        patch="lower_bound(args.cu_ptr, args.stride_cu_0, sequences + 1, query_row)",
    ),
    HopperBug(
        name="keys behind the length",
        attention="hopper_row_lists",
        story="a list was thought to name keys of its sequence alone",
        anchor="N = max(min(many, N), 0);",
        patch="",
    ),
    HopperBug(
        name="pages of the first sequence",
        attention="hopper_row_lists",
        story="the row of the table was that of the only sequence that a kernel sees",
        anchor="args.table_ptr[sequence * args.stride_table_0",
        patch="args.table_ptr[0 * args.stride_table_0",
    ),
    HopperBug(
        name="the first row of a page",
        attention="hopper_row_lists",
        story="a page was taken for its rows",
        anchor="row[1 + i] = (int)table_kv * 16 + kv_idx % 16;",
        patch="row[1 + i] = (int)table_kv * 16;",
    ),
    HopperBug(
        name="pages that follow each other in memory",
        attention="hopper_row_lists",
        story="rows of a pool were thought to lie one behind the other",
        anchor="pages.of[i] / pool.rows * pool.page_stride + pages.of[i] % pool.rows * pool.stride",
        patch="pages.of[i] * pool.stride",
    ),
    HopperBug(
        name="pages of 8 bits that follow each other in memory",
        attention="selected_types",
        story="rows of a pool were thought to follow each other, where scales stand behind those of a page",
        anchor="page / 64 * pool.page_stride + page % 64 * pool.stride",
        patch="page * pool.stride",
    ),
    HopperBug(
        name="scales of the first page",
        attention="selected_types",
        story="a row of memory was taken for its place in a page",
        anchor="(key_row / 64) * args.stride_scale_0",
        patch="0 * args.stride_scale_0",
    ),
    HopperBug(
        name="columns behind a listed key of another row",
        attention="selected_types",
        story="the place in a list was taken for the row of memory",
        anchor="const int key_row = exists ? page : -1",
        patch="const int key_row = exists ? kv_idx : -1",
    ),
    HopperBug(
        name="a sink for rows that are no query",
        attention="hopper_row_lists",
        story="an empty list was thought to be all that such a row needs",
        anchor="query < M ? found : -1;",
        patch="query < M ? found : 0;",
    ),
    HopperBug(
        name="keys looked up before all are there",
        attention="hopper_row_lists",
        story="threads read places of the list that others write",
        anchor="31 - __clz(named & -named); __syncthreads();",
        patch="31 - __clz(named & -named);",
    ),
    HopperBug(
        name="keys of the first thread of a warp not counted",
        attention="hopper_tokens",
        story="a sum over the lanes before left out the lane a step away from the first",
        anchor="at += lane >= step ? before : 0;",
        patch="at += lane > step ? before : 0;",
    ),
    HopperBug(
        name="the first piece of a block alone",
        attention="hopper_block_lists",
        story="every thread had the first keys of its block",
        anchor="const int lo = (int)block * BLOCK + start % PIECES * PIECE;",
        patch="const int lo = (int)block * BLOCK;",
    ),
    HopperBug(
        name="no last block where it is not whole",
        attention="hopper_block_lists",
        story="blocks were counted without the last one",
        anchor="block >= (N + BLOCK - 1) / BLOCK",
        patch="block >= N / BLOCK",
    ),
    HopperBug(
        name="keys that the mask forbids kept in blocks",
        attention="hopper_block_lists",
        story="a block was thought to be seen whole",
        anchor="kept |= keeps(key) ? 1u << key % 32 : 0u;",
        patch="kept |= 1u << key % 32;",
    ),
    HopperBug(
        name="rows of a word in each other's place",
        attention="hopper_block_lists",
        story="a lane counted the keys behind its own",
        anchor="row[1 + at + __popc(named & ((1u << lane) - 1))]",
        patch="row[1 + at + __popc(named & ((1u << lane % 16) - 1))]",
    ),
    TritonBug(
        name="keys of the first packed sequence",
        attention="row_lists",
        story="keys were not moved to their sequence",
        anchor="(k_first + entry.to(tl.int32)).to(tl.float32, bitcast=True)",
        patch="entry.to(tl.int32).to(tl.float32, bitcast=True)",
    ),
    TritonBug(
        name="gradients of keys that the mask forbids",
        attention="row_lists",
        story="a second kernel made lists without the mask of the first",
        anchor="named = named & (kv_idx <= query + N - M) tl.store(marks + entry",
        patch="tl.store(marks + entry",
    ),
    TritonBug(
        name="gradients of keys of the first packed sequence",
        attention="row_lists",
        story="keys were moved to their sequence in the forward alone",
        anchor="(k_first + block).to(tl.float32, bitcast=True)",
        patch="block.to(tl.float32, bitcast=True)",
    ),
)
