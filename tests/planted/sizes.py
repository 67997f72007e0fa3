"""Bugs that show beyond a certain size, or at one size alone: rounds of a search, tiles, splits, sections."""

from __future__ import annotations

from tests.planted.bug import Bug, CudaBug, ProjectionBug, TritonBug

BUGS: tuple[Bug, ...] = (
    # Rounds of a search
    TritonBug(
        name="the last round looks at single elements",
        attention="document",
        story="two rounds of 128 looks were enough for 16384 elements, and nobody had more",
        anchor="other=0) < value) & inside "
        "lo = tl.minimum(lo + tl.sum(before.to(tl.int32), 0) * run, length) "
        "run = tl.where(run == 1, 0, tl.cdiv(run, 128))",
        patch="other=0) < value) & inside\n"
        "        lo = tl.minimum(lo + tl.sum(before.to(tl.int32), 0) * run, length)\n"
        "        run = tl.where(run == 1, 0, 1)",
    ),
    TritonBug(
        name="ends of documents searched in the first 16384 elements",
        attention="document",
        story="the length of the row was clipped to what two rounds can reach",
        anchor="<= value) & inside lo = tl.minimum(lo + tl.sum(before.to(tl.int32), 0) * run, length)",
        patch="<= value) & inside\n        lo = tl.minimum(lo + tl.sum(before.to(tl.int32), 0) * run, 16384)",
    ),
    CudaBug(
        name="ends of documents searched in the first 16384 elements",
        attention="document",
        story="the length of the row was kept in 14 bits of a packed number",
        anchor="long long value) { int lo = 0, hi = length; while (lo < hi) { "
        "const int middle = (lo + hi) / 2; if (row[middle * stride] <= value)",
        patch="long long value)\n{\n    int lo = 0, hi = min(length, 16384);\n    while (lo < hi) {\n"
        "        const int middle = (lo + hi) / 2;\n        if (row[middle * stride] <= value)",
    ),
    TritonBug(
        name="sequences found among 127",
        attention="varlen",
        story="one round looks at 128 starts, and a batch of more came later",
        anchor="run = tl.cdiv(B + 1, 128)",
        patch="run = 1",
    ),
    CudaBug(
        name="sequences found among 127",
        attention="varlen",
        story="the number of a sequence was kept in a signed byte",
        anchor="const int b = min(sequence, B - 1);",
        patch="const int b = min(min(sequence, B - 1), 127);",
    ),
    # Rows and heads
    TritonBug(
        name="rows of the first 32 tiles",
        attention="causal_gqa",
        story="tiles of a head were counted in five bits of a packed number",
        anchor="q_tiles = tl.cdiv(M, BLOCK_M)",
        patch="q_tiles = tl.minimum(tl.cdiv(M, BLOCK_M), 32)",
    ),
    TritonBug(
        name="dq of the first 4096 rows",
        attention="full",
        story="tiles of a head were counted in six bits of a packed number",
        anchor="q_tiles = M_padded // BLOCK_M",
        patch="q_tiles = tl.minimum(M_padded, 4096) // BLOCK_M",
        phase="backward",
    ),
    CudaBug(
        name="rows of the first 4096",
        attention="causal_gqa",
        story="the table of tiles had room for 4096 rows",
        anchor="store_rows<DV, DV, BLOCK_M>(outputs, q_tile, q_lo, M);",
        patch="store_rows<DV, DV, BLOCK_M>(outputs, q_tile, q_lo, min(M, 4096));",
    ),
    CudaBug(
        name="dq of rows beyond 4096 left as a sum",
        attention="causal_gqa",
        file="backward_finish",
        story="the kernel that rounds dq was launched for a fixed number of tiles",
        anchor="if (q_lo + row >= M)",
        patch="if (q_lo + row >= min(M, 4096))",
    ),
    CudaBug(
        name="sections of heads all as long as the first",
        attention="full",
        story="the last section began early enough to be as long, and with few heads there is but one",
        anchor="tile / (q_tiles * args.SECTION) * args.SECTION;",
        patch="min(tile / (q_tiles * args.SECTION) * args.SECTION, B * H - args.SECTION);",
    ),
    CudaBug(
        name="sections of kv heads all as long as the first",
        attention="causal_gqa",
        file="backward_dkdv",
        story="the last section began early enough to be as long, and with few heads there is but one",
        anchor="tile / (kv_tiles * args.KV_SECTION) * args.KV_SECTION;",
        patch="min(tile / (kv_tiles * args.KV_SECTION) * args.KV_SECTION, args.B * Hkv - args.KV_SECTION);",
    ),
    TritonBug(
        name="heads counted in 16 bits",
        attention="decode",
        story="the second axis of a grid ends at 65535, and heads were on it",
        anchor="head = tile // row_tiles",
        patch="head = tile // row_tiles & 0xFFFF",
    ),
    CudaBug(
        name="heads counted in 16 bits",
        attention="decode",
        story="the second axis of a grid ends at 65535, and heads were on it",
        anchor="const int b = tile / row_tiles / Hkv, h_kv = tile / row_tiles % Hkv;",
        patch="const int b = (tile / row_tiles & 0xffff) / Hkv, h_kv = (tile / row_tiles & 0xffff) % Hkv;",
    ),
    # Shares
    TritonBug(
        name="the first 16 splits joined",
        attention="paged_decode",
        story="splits are joined 16 at a time, and no test had more",
        anchor="for first in range(0, SPLITS, 16)",
        patch="for first in range(0, 16, 16)",
    ),
    TritonBug(
        name="the maximum of the first 16 splits",
        attention="paged_decode",
        story="splits are joined 16 at a time, and so the maximum was taken of 16",
        anchor="mask=splits < SPLITS",
        patch="mask=splits < tl.minimum(SPLITS, 16)",
    ),
    CudaBug(
        name="the maximum of the first 32 splits",
        attention="paged_decode",
        story="a warp has 32 lanes, each had a split, and no test had more",
        anchor="for (int split = lane; split < args.SPLITS; split += 32)",
        patch="for (int split = lane; split < min(args.SPLITS, 32); split += 32)",
    ),
    CudaBug(
        name="the first 16 splits joined",
        attention="decode",
        story="four warps add four splits each",
        anchor="for (int split = warp; split < args.SPLITS; split += WARPS)",
        patch="for (int split = warp; split < min(args.SPLITS, 4 * WARPS); split += WARPS)",
    ),
    TritonBug(
        name="splits that are no whole tiles",
        attention="paged_decode",
        story="keys were divided evenly, and a tile that begins inside a page reads the wrong one",
        anchor="split_size = tl.cdiv(tl.cdiv(tl.maximum(hi, 0), BLOCK_N), SPLITS) * BLOCK_N",
        patch="split_size = tl.cdiv(tl.maximum(hi, 0), SPLITS)",
    ),
    CudaBug(
        name="splits that are no whole tiles",
        attention="paged_decode",
        story="keys were divided evenly, and tiles of neighbours overlap",
        anchor="((max(hi, 0) + BLOCK_N - 1) / BLOCK_N + args.SPLITS - 1) / args.SPLITS * BLOCK_N",
        patch="(hi + args.SPLITS - 1) / args.SPLITS",
    ),
    TritonBug(
        name="the rest of the tiles left out",
        attention="decode",
        story="tiles were divided by splits rounding down, which is right while there are as many as divide",
        anchor="split_size = tl.cdiv(tl.cdiv(tl.maximum(hi, 0), BLOCK_N), SPLITS) * BLOCK_N",
        patch="split_size = tl.maximum(tl.cdiv(tl.maximum(hi, 0), BLOCK_N) // SPLITS, 1) * BLOCK_N",
    ),
    # A certain number of tiles
    TritonBug(
        name="the third tile's pages are the second's",
        attention="paged_decode",
        story="pages are looked up before the loop, and one place was counted twice",
        anchor="split_lo + 2 * BLOCK_N",
        patch="split_lo + 1 * BLOCK_N",
    ),
    CudaBug(
        name="no group for tiles that are not there",
        attention="full",
        story="where nothing was left to copy no group was closed, and waits count groups",
        anchor="copy_rows<D, D, BLOCK_N>(k_tiles + stage * BLOCK_N * D, keys, k_next, N); commit_copies();",
        patch="{\n            copy_rows<D, D, BLOCK_N>(k_tiles + stage * BLOCK_N * D, keys, k_next, N);\n"
        "            commit_copies();\n        }",
    ),
    CudaBug(
        name="no group for q tiles that are not there",
        attention="staged",
        file="backward_dkdv",
        story="where nothing was left to copy no group was closed, and waits count groups (with two tiles in "
        "shared memory every wait is for all, and nobody had three)",
        anchor="} commit_copies(); q_next = next(q_next);",
        patch="    commit_copies();\n            }\n            q_next = next(q_next);",
    ),
    TritonBug(
        name="two tiles taken for one",
        attention="full",
        story="a fast path for short sequences tested the number of tiles, one off",
        anchor="full_hi = N // BLOCK_N * BLOCK_N",
        patch="full_hi = tl.where(N == 2 * BLOCK_N, BLOCK_N, N) // BLOCK_N * BLOCK_N\n"
        "    N = tl.where(N == 2 * BLOCK_N, BLOCK_N, N)",
    ),
    CudaBug(
        name="two tiles taken for one",
        attention="full",
        story="a fast path for short sequences tested the number of tiles, one off",
        anchor="for (int stage = 0; kv_lo < hi;",
        patch="for (int stage = 0; kv_lo < (hi == 2 * BLOCK_N ? BLOCK_N : hi);",
    ),
    # Projections
    ProjectionBug(
        name="splits joined for 1024 columns",
        attention="linear",
        story="the kernel that joins splits was launched over rows alone",
        anchor="n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)",
        patch="n = tl.arange(0, BLOCK)",
    ),
    ProjectionBug(
        name="a grid for 1024 columns",
        attention="linear_bias",
        story="one program joined the splits of a row, which was as wide as the model",
        anchor="triton.cdiv(N, 1024)",
        patch="1",
    ),
    ProjectionBug(
        name="rows beyond the first tile",
        attention="linear",
        story="decoding has few rows, and 64 fit a tile",
        anchor="rows = max(min(triton.next_power_of_2(M), 64), 8) "
        "grid = (triton.cdiv(N, config.BLOCK_N), _row_tiles(M, rows, config.impl), config.SPLIT_K)",
        patch="rows = max(min(triton.next_power_of_2(M), 64), 8)\n"
        "            grid = (triton.cdiv(N, config.BLOCK_N), 1, config.SPLIT_K)",
    ),
)
