// What threads do with fragments, 8 columns of an accumulator of wgmma: x[j][2 r + c] is column 8 j + 2 t + c of row 8
// r + g of a warp, where g is lane / 4 and t is lane % 4.

// The maximum of each row, over all columns.
template <int FRAGMENTS>
__device__ __forceinline__ void row_maxima(float (&top)[2], const float (&s)[FRAGMENTS][4])
{
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        // two shorter chains
        float even = fmaxf(s[0][2 * r], s[0][2 * r + 1]), odd = fmaxf(s[1][2 * r], s[1][2 * r + 1]);
#pragma unroll
        for (int j = 2; j < FRAGMENTS; j += 2) {
            even = fmaxf(even, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
            odd = fmaxf(odd, fmaxf(s[j + 1][2 * r], s[j + 1][2 * r + 1]));
        }
        top[r] = row_max(fmaxf(even, odd));
    }
}

// Rounded: fragments of an accumulator are laid out as those of a left operand.
template <int DEPTH>
__device__ __forceinline__ void round_fragments(u32 (&left)[DEPTH][4], const float (&x)[2 * DEPTH][4])
{
#pragma unroll
    for (int n = 0; n < DEPTH; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            left[n][i] = pack(x[2 * n + i / 2][i % 2 * 2], x[2 * n + i / 2][i % 2 * 2 + 1]);
}

template <int FRAGMENTS>
__device__ __forceinline__ void scale_rows(float (&x)[FRAGMENTS][4], const float (&factor)[2])
{
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            x[j][i] *= factor[i / 2];
}

// Four lanes hold a row of four fragments, each a pair of columns of every fragment: they exchange them for all 8
// columns of fragment t.
__device__ __forceinline__ void exchange_pairs(u32 (&x)[4], int t)
{
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 other = shuffle_xor(t & 1 ? x[i] : x[i + 1], 1);
        x[i] = t & 1 ? other : x[i];
        x[i + 1] = t & 1 ? x[i + 1] : other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 other = shuffle_xor(t & 2 ? x[i] : x[i + 2], 2);
        x[i] = t & 2 ? other : x[i];
        x[i + 2] = t & 2 ? x[i + 2] : other;
    }
}

// Stores the columns of a row that a thread holds, rounded, 16 bytes at a time.
template <int FRAGMENTS>
__device__ __forceinline__ void store_row(element* row, bool exists, const float (&x)[FRAGMENTS][4], int r,
    float factor, int t)
{
    auto rounded = [&](int j) { return pack(x[j][2 * r] * factor, x[j][2 * r + 1] * factor); };
#pragma unroll
    for (int j = 0; j + 3 < FRAGMENTS; j += 4) {
        u32 pairs[4] = {rounded(j), rounded(j + 1), rounded(j + 2), rounded(j + 3)};
        exchange_pairs(pairs, t);
        if (exists)
            store_chunk(row + 8 * (j + t), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
#pragma unroll
    for (int j = FRAGMENTS / 4 * 4; j < FRAGMENTS; ++j)
        if (exists)
            *(u32*)(row + 8 * j + 2 * t) = rounded(j);
}
