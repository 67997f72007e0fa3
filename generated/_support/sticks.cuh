// Device functions of stick-breaking, on fragments of scores: x[j][2 r + c] is key 8 j + 2 t + c of row 8 r + g of a
// warp, where g is lane / 4 and t is lane % 4.

// log2(1 + 2^z), within 2^-22 of it for small 2^z, too: the larger of z and 0, and a polynomial of e = 2^-|z|,
// log2(1 + e) / e.
__device__ __forceinline__ float softplus2(float z)
{
    const float e = exp2_(-fabsf(z));
    float q = 0.007548789028078318f * e - 0.0425654873251915f;
    q = q * e + 0.11285362392663956f;
    q = q * e - 0.19711679220199585f;
    q = q * e + 0.2756403982639313f;
    q = q * e - 0.35840821266174316f;
    q = q * e + 0.48069292306900024f;
    q = q * e - 0.7213401794433594f;
    q = q * e + 1.4426950216293335f;
    return q * e + fmaxf(z, 0.0f);
}

// Scores, in base 2 once multiplied by `scale`, become what keys take of the stick, the last key first. rest: what the
// keys behind this tile leave of each row, as -log2; then those of this tile, too.
template <int FRAGMENTS>
__device__ __forceinline__ void break_sticks(float (&x)[FRAGMENTS][4], float scale, float (&rest)[2], int t)
{
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float broken = 0.0f;  // by the keys of this tile so far
#pragma unroll
        for (int j = FRAGMENTS - 1; j >= 0; --j) {
            const float z0 = x[j][2 * r] * scale, z1 = x[j][2 * r + 1] * scale;
            const float left0 = softplus2(z0), left1 = softplus2(z1);  // -log2(1 - sigmoid)
            // Four lanes hold a fragment of a row: sums of one lane, of two and of four.
            const float own = left0 + left1, beside = shuffle_xor(own, 1);
            const float pair = own + beside, others = shuffle_xor(pair, 2);
            const float later = broken + (t < 2 ? others : 0.0f) + (t % 2 == 0 ? beside : 0.0f);
            x[j][2 * r] = exp2_(z0 - left0 - (later + left1) - rest[r]);
            x[j][2 * r + 1] = exp2_(z1 - left1 - later - rest[r]);
            broken += pair + others;
        }
        rest[r] += broken;
    }
}
