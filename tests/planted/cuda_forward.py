"""Bugs planted in CUDA kernels: what goes wrong between threads, in fragments and in shared memory."""

from __future__ import annotations

from tests.planted.bug import CudaBug

BUGS: tuple[CudaBug, ...] = (
    # Barriers and copies
    CudaBug(
        name="no barrier before K is read",
        attention="full",
        story="every thread waited for its own copies, not for those of the others",
        anchor="__syncthreads();  // K is there",
        patch="// K is there",
    ),
    CudaBug(
        name="no barrier before V is read",
        attention="full",
        story="the barrier was taken for one of the copies of K",
        anchor="__syncthreads();  // V is there",
        patch="// V is there",
    ),
    CudaBug(
        name="K not waited for",
        attention="full",
        story="a copy that is only started looks finished when the memory is fast",
        anchor="wait_copies<2 * (STAGES - 1)>(); __syncthreads();  // K",
        patch="__syncthreads();  // K",
    ),
    CudaBug(
        name="waits for one group too few",
        attention="causal_gqa",
        story="the newest group was counted among those that may be under way",
        anchor="wait_copies<2 * (STAGES - 1)>(); __syncthreads();  // V",
        patch="wait_copies<2 * STAGES - 1>(); __syncthreads();  // V",
    ),
    CudaBug(
        name="V copied to the stage at hand",
        attention="full",
        story="the ring of buffers was indexed by the tile that is read",
        anchor="copy_v((stage + STAGES - 1) % STAGES);",
        patch="copy_v(stage);",
    ),
    CudaBug(
        name="barrier in a divergent branch",
        attention="full",
        story="a warp without work went past the barrier that the others wait at",
        anchor="__syncthreads();  // K is there",
        patch="if (warp != 1) __syncthreads();  // K is there",
    ),
    CudaBug(
        name="output staged without a barrier",
        attention="full",
        story="rows were stored by other threads than those that put them into shared memory",
        anchor="__syncthreads(); const Rows<element> outputs",
        patch="const Rows<element> outputs",
    ),
    # Shared memory
    CudaBug(
        name="rows past the end not zero-filled",
        attention="full",
        story="0 * NaN: what lies behind V reached the output through weights of 0",
        anchor="const bool inside = first + row + i < stop",
        patch="const bool inside = true",
    ),
    CudaBug(
        name="wrong swizzle",
        attention="full",
        story="the permuted chunk was counted on instead of being permuted again",
        anchor="(first ^ chunks % PERIOD<WIDTH> * 16)",
        patch="(first + chunks % PERIOD<WIDTH> * 16)",
    ),
    # Fragments
    CudaBug(
        name="P with its halves exchanged",
        attention="full",
        story="the conversion puts its first operand into the high half",
        anchor="pack(pieces[i][2 * n + x / 2][x % 2 * 2], pieces[i][2 * n + x / 2][x % 2 * 2 + 1])",
        patch="pack(pieces[i][2 * n + x / 2][x % 2 * 2 + 1], pieces[i][2 * n + x / 2][x % 2 * 2])",
    ),
    CudaBug(
        name="V not transposed",
        attention="full",
        story="K needs no transposition and V does",
        anchor="ldmatrix_x4_trans(v, after",
        patch="ldmatrix_x4(v, after",
    ),
    CudaBug(
        name="maximum of half a row",
        attention="full",
        story="four lanes share a row, and the reduction stopped after two",
        anchor="return fmaxf(x, shuffle_xor(x, 2));",
        patch="return x;",
    ),
    CudaBug(
        name="sum of a quarter of a row",
        attention="full",
        story="sums are kept by lane until the end, where they were not added up",
        anchor="l[r] = row_sum(l[r]);",
        patch="",
    ),
    CudaBug(
        name="mask on the wrong columns",
        attention="causal_gqa",
        story="a lane was thought to hold columns t and t + 4 of a fragment",
        anchor="const int kv_idx = kv_lo + 8 * j + 2 * t + c;",
        patch="const int kv_idx = kv_lo + 8 * j + t + 4 * c;",
    ),
    CudaBug(
        name="mask on the wrong rows",
        attention="causal_gqa",
        story="the second row of a fragment is 8 below the first, not the next",
        anchor="q_idx[r] = q_lo + warp * WARP_M + 8 * r + g;",
        patch="q_idx[r] = q_lo + warp * WARP_M + r / 2 * 16 + 2 * g + r % 2;",
    ),
    # Split-K
    CudaBug(
        name="split-K without rescaling",
        attention="fa2_split_k",
        story="what had been summed kept its old scale",
        anchor="acc[c][i][e] *= factors[row];",
        patch="",
    ),
    CudaBug(
        name="split-K leaves out a warp",
        attention="fa2_split_k",
        story="the warp that adds up was thought to hold its own part already",
        anchor="for (int w = 0; w < WARPS; ++w) acc[c][i][e] +=",
        patch="for (int w = 1; w < WARPS; ++w) acc[c][i][e] +=",
    ),
    CudaBug(
        name="split-K, each warp its own maximum",
        attention="fa2_split_k",
        story="parts of a row with different maxima were added without rescaling",
        anchor="maxima[w * BLOCK_M + 8 * r + g]",
        patch="maxima[warp * BLOCK_M + 8 * r + g]",
    ),
    CudaBug(
        name="split-K sums too early",
        attention="fa2_split_k",
        story="no barrier between writing the parts and adding them",
        anchor="__syncthreads(); #pragma unroll for (int i = 0; i < OWN; ++i) {",
        patch="\n#pragma unroll\n    for (int i = 0; i < OWN; ++i) {",
    ),
    CudaBug(
        name="split-K, sum of one warp",
        attention="fa2_split_k",
        story="the denominators of the other warps were forgotten",
        anchor="l[r] += sums[w * BLOCK_M + 8 * r + g];",
        patch="l[r] += w == 0 ? sums[8 * r + g] : 0.0f;",
    ),
    CudaBug(
        name="split-K normalised before the other sums are there",
        attention="fa1_split_k",
        story="o stays normalised, by a denominator of one warp's keys",
        anchor="l[r] += sums[w * BLOCK_M + 8 * r + g];",
        patch="l[r] += w == warp ? sums[w * BLOCK_M + 8 * r + g] : 0.0f;",
    ),
    # FlashAttention-1 order
    CudaBug(
        name="query tile overwritten",
        attention="fa1_split_q",
        story="the copy of the next tile was started while warps still read the last one",
        anchor="__syncthreads();  // all have read the buffer that the next copy writes",
        patch="",
    ),
    CudaBug(
        name="maximum not written back",
        attention="fa1_split_k",
        story="the sum was, and so the first tiles were rescaled wrongly",
        anchor="m_rows[row] = m[r];",
        patch="",
    ),
    # The rest
    CudaBug(
        name="dropout draws the same pair twice",
        attention="dropout",
        story="four lanes trade what they drew, and neighbours did not",
        anchor="trade_bits(trade_bits(kept, 2, 8, 0x00FF00FFu), 1, 4, 0x0F0F0F0Fu)",
        patch="trade_bits(kept, 2, 8, 0x00FF00FFu)",
    ),
    CudaBug(
        name="dropout with batch and head exchanged",
        attention="dropout",
        story="the same mask was drawn, for another head",
        anchor="u32 draw_keys(const Draw& draw, long long key, int b, int h,",
        patch="u32 draw_keys(const Draw& draw, long long key, int h, int b,",
    ),
    CudaBug(
        name="sink counted by every lane",
        attention="local_sink",
        story="four lanes share a row, and each started its sum with the sink",
        anchor="l[r] = t == 0 ? 1.0f : 0.0f;",
        patch="l[r] = 1.0f;",
    ),
    CudaBug(
        name="K/V heads interleaved",
        attention="causal_gqa",
        story="head h read K/V head h % Hkv, not h // G",
        anchor="h_kv = h / G",
        patch="h_kv = h % (H / G)",
    ),
    CudaBug(
        name="base-2 lse",
        attention="causal_gqa",
        story="the kernel works in base 2 and the log-sum-exp left it so",
        anchor="(m[r] + log2f(l[r])) * LN2",
        patch="m[r] + log2f(l[r])",
    ),
)
