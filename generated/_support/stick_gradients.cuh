// Device functions of the gradients of stick-breaking. x: scores in base 2, -inf where masked, which become what keys
// take; shares: sigmoids; gradients: those of what keys take, which become those of scores,
//
//     ds = p dp - share (dlse + sum of p dp up to the key)

// What a key adds to the sum: 0 where it takes nothing, whatever dp is.
__device__ __forceinline__ float give(float p, float dp) { return p == 0.0f ? 0.0f : p * dp; }

// Rows are queries: x[j][2 r + c] is key 8 j + 2 t + c of row 8 r + g. behind: -log2 of what the keys behind this tile
// leave of each row; before: dlse and the p dp of the keys before it, then of those of it, too.
template <int FRAGMENTS>
__device__ __forceinline__ void differentiate_sticks(float (&x)[FRAGMENTS][4], float (&shares)[FRAGMENTS][4],
    float (&gradients)[FRAGMENTS][4], const float* behind, float* before, int t)
{
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float broken = 0.0f;
#pragma unroll
        for (int j = FRAGMENTS - 1; j >= 0; --j) {
            const float z0 = x[j][2 * r], z1 = x[j][2 * r + 1];
            const float left0 = softplus2(z0), left1 = softplus2(z1);
            const float own = left0 + left1, beside = shuffle_xor(own, 1);
            const float pair = own + beside, others = shuffle_xor(pair, 2);
            const float later = broken + (t < 2 ? others : 0.0f) + (t % 2 == 0 ? beside : 0.0f);
            shares[j][2 * r] = exp2_(z0 - left0);
            shares[j][2 * r + 1] = exp2_(z1 - left1);
            x[j][2 * r] = exp2_(z0 - left0 - (later + left1) - behind[r]);
            x[j][2 * r + 1] = exp2_(z1 - left1 - later - behind[r]);
            broken += pair + others;
        }
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j) {
            const float given0 = give(x[j][2 * r], gradients[j][2 * r]),
                given1 = give(x[j][2 * r + 1], gradients[j][2 * r + 1]);
            const float own = given0 + given1, beside = shuffle_xor(own, 1);
            const float pair = own + beside, others = shuffle_xor(pair, 2);
            const float earlier = before[r] + (t < 2 ? 0.0f : others) + (t % 2 == 0 ? 0.0f : beside);
            gradients[j][2 * r] = given0 - shares[j][2 * r] * (earlier + given0);
            gradients[j][2 * r + 1] = given1 - shares[j][2 * r + 1] * (earlier + own);
            before[r] += pair + others;
        }
    }
}

// Rows are keys, and a warp has some of a tile: x[i][j][2 r + c] is key 16 i + 8 r + g, query 8 j + 2 t + c. x becomes
// the exponent of what keys take of what those of other warps leave; lefts: of each query, what these keys leave.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void leave_sticks(float (&x)[ROWS][COLUMNS][4], float (&shares)[ROWS][COLUMNS][4],
    float* lefts, int g, int t)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float later = 0.0f;
#pragma unroll
            for (int row = 2 * ROWS - 1; row >= 0; --row) {
                float& z = x[row / 2][j][row % 2 * 2 + c];
                const float left = softplus2(z);
                float behind = 0.0f, total = left;  // of eight lanes
#pragma unroll
                for (int mask = 1; mask < 8; mask *= 2) {
                    const float other = shuffle_xor(total, 4 * mask);
                    if (!(g & mask))
                        behind += other;
                    total += other;
                }
                shares[row / 2][j][row % 2 * 2 + c] = exp2_(z - left);
                z = z - left - (later + behind);
                later += total;
            }
            if (g == 0)
                lefts[8 * j + 2 * t + c] = later;
        }
}

// The same for gradients, but for what comes before the keys of this warp. behind: of query 8 j + 2 t + c, -log2 of
// what the keys behind those of this warp leave; givens: of each query, the p dp of these keys.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void take_sticks(float (&x)[ROWS][COLUMNS][4], const float (&shares)[ROWS][COLUMNS][4],
    float (&gradients)[ROWS][COLUMNS][4], const float (&behind)[COLUMNS][2], float* givens, int g, int t)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float earlier = 0.0f;
#pragma unroll
            for (int row = 0; row < 2 * ROWS; ++row) {
                float& p = x[row / 2][j][row % 2 * 2 + c];
                float& ds = gradients[row / 2][j][row % 2 * 2 + c];
                p = exp2_(p - behind[j][c]);
                const float given = give(p, ds);
                float before = 0.0f, total = given;  // of eight lanes
#pragma unroll
                for (int mask = 1; mask < 8; mask *= 2) {
                    const float other = shuffle_xor(total, 4 * mask);
                    if (g & mask)
                        before += other;
                    total += other;
                }
                ds = given - shares[row / 2][j][row % 2 * 2 + c] * (earlier + before + given);
                earlier += total;
            }
            if (g == 0)
                givens[8 * j + 2 * t + c] = earlier;
        }
}
