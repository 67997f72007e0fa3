// Sums in an absolute order: what kernels of prompts, those that decode and those that join splits have in common.
//
// nvrtc: --fmad=false
//
// So a product and a sum are rounded once where the text says fmaf, and nowhere else: every kernel rounds alike.

// The kind of a tile that begins a segment: the products of its p are the first of their sums.
struct SegmentStart { static constexpr bool value = true; };
template <class Kind> constexpr bool STARTS_SEGMENT = false;
template <> constexpr bool STARTS_SEGMENT<SegmentStart> = true;

// What two sums of a row, under maxima of their own, are multiplied by under the larger one.
struct Shares {
    float all, own;
};

// Those of what is joined so far, under m_all, and of a segment, under m; m_all becomes the larger one. A segment in
// which a row sees no key, of m = -INF and sums of 0, changes nothing.
__device__ __forceinline__ Shares share(float& m_all, float m)
{
    const float m_new = fmaxf(m_all, m), shift = m_new == -INF ? 0.0f : m_new;  // -INF - -INF is NaN
    const Shares shares = {exp2_(m_all - shift), exp2_(m - shift)};
    m_all = m_new;
    return shares;
}

__device__ __forceinline__ float join(float all, float own, const Shares& shares)
{
    return fmaf(all, shares.all, own * shares.own);
}

// A sink joins the denominator as a key without a value: sums of rows become those with it. l: of all lanes.
template <int FRAGMENTS>
__device__ __forceinline__ void join_sink(float (&x)[FRAGMENTS][4], float (&m)[2], float (&l)[2],
    const float (&logits)[2])
{
    Shares shares[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        shares[r] = share(m[r], logits[r]);
        l[r] = join(l[r], 1.0f, shares[r]);
    }
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            x[j][i] = join(x[j][i], 0.0f, shares[i / 2]);
}
