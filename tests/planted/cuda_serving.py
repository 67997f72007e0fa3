"""Bugs planted in CUDA kernels of decoding, pages and packed sequences."""

from __future__ import annotations

from tests.planted.bug import CudaBug

BUGS: tuple[CudaBug, ...] = (
    # Pages and packed sequences
    CudaBug(
        name="32-bit page offsets",
        attention="paged_decode",
        story="a page's number times its stride passes 2^31 in a pool of a few gigabytes",
        anchor="first + page * page_stride",
        patch="first + (int)(page * page_stride)",
    ),
    CudaBug(
        name="rows past the end of a page's sequence copied",
        attention="chunked_prefill",
        story="the rest of the last page is what its owner before left there, and 0 * NaN is NaN",
        anchor="from, first + row + i < stop &&",
        patch="from, true &&",
    ),
    CudaBug(
        name="one page for all rows of a tile",
        attention="chunked_prefill",
        story="rows that lie in one page share its number, and the tile was taken for one such run",
        anchor="pages.of(run)",
        patch="pages.of(0)",
    ),
    CudaBug(
        name="pages of the next tile",
        attention="chunked_prefill",
        story="pages are looked up a tile ahead, and v was copied with those of the keys after it",
        anchor="values, v_pages, v_next, N",
        patch="values, k_pages, v_next, N",
    ),
    CudaBug(
        name="page size assumed",
        attention="chunked_prefill",
        story="the kernel was written for pages of 32 rows",
        anchor="constexpr u32 PAGE = 16;",
        patch="constexpr u32 PAGE = 32;",
    ),
    CudaBug(
        name="one table for all sequences",
        attention="chunked_prefill",
        story="the stride of the block table was forgotten",
        anchor="args.block_table_ptr[b * args.stride_block_table_0]",
        patch="args.block_table_ptr[0]",
    ),
    CudaBug(
        name="pages laid out like those of k",
        attention="chunked_prefill",
        story="v was addressed with k's strides",
        anchor="args.stride_vp, args.stride_vn",
        patch="args.stride_kp, args.stride_kn",
    ),
    CudaBug(
        name="rows behind the last sequence are its own",
        attention="varlen",
        story="a grid that covers any lengths has tiles past cu_seqlens[B]",
        anchor="int M = sequence < B ? q_rows : 0;",
        patch="int M = q_rows;",
    ),
    CudaBug(
        name="the last sequence ends where the tensor does",
        attention="varlen",
        story="rows that are left over were thought to be its own",
        anchor="q_end = sequence < B ?",
        patch="q_end = sequence < B - 1 ?",
    ),
    CudaBug(
        name="keys of the first sequence",
        attention="varlen",
        story="only queries were moved to the sequence at hand",
        anchor="args.k_ptr + k_first * args.stride_kn",
        patch="args.k_ptr + 0 * args.stride_kn",
    ),
    # Decoding
    CudaBug(
        name="empty splits joined",
        attention="paged_decode",
        story="(-inf) - (-inf): a row whose splits are all empty has no maximum",
        anchor="const float shift = m == -INF ? 0.0f : m;",
        patch="const float shift = m;",
    ),
    CudaBug(
        name="splits weighed alike",
        attention="paged_decode",
        story="o was averaged over the splits, and lse forgotten",
        anchor="const float weight = exp2_(lse[split] - shift);",
        patch="const float weight = 1.0f;",
    ),
    CudaBug(
        name="lse of a split in natural units",
        attention="paged_decode",
        story="the kernels agree on base 2, and one of them converted too early",
        anchor="= m[r] + log2f(l[r]);",
        patch="= (m[r] + log2f(l[r])) * LN2;",
    ),
    CudaBug(
        name="splits that overlap by a tile",
        attention="paged_decode",
        story="a split was rounded up to whole tiles after its start had been computed",
        anchor="split_hi = min(split_lo + split_size, hi);",
        patch="split_hi = min(split_lo + split_size + BLOCK_N, hi);",
    ),
    CudaBug(
        name="warps joined without their maxima",
        attention="paged_decode",
        story="each warp has keys and a maximum of its own, and the sums were simply added",
        anchor="* exp2_(maxima[w * BLOCK_M + 8 * r + g] - shift);",
        patch=";",
    ),
    CudaBug(
        name="parts of warps summed before they are there",
        attention="paged_decode",
        story="the barrier between writing and adding was taken for one too many",
        anchor="__syncthreads(); #pragma unroll for (int i = 0; i < OWN; ++i) {",
        patch="\n#pragma unroll\n    for (int i = 0; i < OWN; ++i) {",
    ),
    CudaBug(
        name="the tiles overwritten by the statistics",
        attention="paged_decode",
        story="a warp that was done early wrote its maxima where others still read keys",
        anchor="wait_copies<0>(); __syncthreads();  // the tiles are free",
        patch="wait_copies<0>();",
    ),
    CudaBug(
        name="query read before it is there",
        attention="paged_decode",
        story="warps copy their own keys, but all of them read the query tile",
        anchor="wait_copies<2 * STAGES - 1>(); __syncthreads();  // q is there",
        patch="wait_copies<2 * STAGES - 1>();",
    ),
    CudaBug(
        name="every packed head a query of its own",
        attention="speculative",
        story="the mask took a row of the tile for a query, without dividing by the group",
        anchor="q_idx[r] = (row_lo + warp * WARP_M + 8 * r + g) / G;",
        patch="q_idx[r] = row_lo + warp * WARP_M + 8 * r + g;",
    ),
    CudaBug(
        name="the sink in every split",
        attention="decode_sink",
        story="the splits are added up, and each had counted the sink",
        anchor="""m[r] = split == 0 ? sink_q[r] * NUMBERf : -INF;
            l[r] = warp == 0 && t == 0 && split == 0 ? 1.0f : 0.0f;""",
        patch=lambda log2e: f"m[r] = sink_q[r] * {log2e!r}f; l[r] = warp == 0 && t == 0 ? 1.0f : 0.0f;",
    ),
    CudaBug(
        name="unified maximum without a fallback",
        attention="unified_decode",
        story="phi was thought to hold for every input; scores beyond its range gave NaN",
        anchor="if (any_thread(lost)) {",
        patch="if (false) {",
    ),
    CudaBug(
        name="fallback decided by each warp",
        attention="unified_decode",
        story="warps that had nothing to do again went past the others' barriers",
        anchor="if (any_thread(lost)) {",
        patch="if (lost) {",
    ),
    CudaBug(
        name="values of another column of the compressed keys",
        attention="mla_decode",
        story="v was taken for the last columns of k",
        anchor="const element* const v_tile = k_tile;",
        patch="const element* const v_tile = k_tile + 64;",
    ),
)
