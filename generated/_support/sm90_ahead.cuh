// Device functions of kernels whose epilogue copies rows ahead.

#ifndef ATTNC_SHIM

// Waits for the copies of this thread, by cp.async. Lanes see each other's behind a __syncwarp.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 1 / x, 2^-23 of it off; 0 where that is less than 2^-126.
__device__ __forceinline__ float reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x is computed before what comes behind it, not behind a branch.
__device__ __forceinline__ void compute_here(float& x) { asm volatile("" : "+f"(x)); }

#else
static inline void compute_here(float&) {}
static inline float reciprocal(float x) { return x >= 0x1p126f ? 0.0f : 1.0f / x; }
#endif

// x and y become their sigmoids over l >= 2^-60, by one reciprocal: of a = l (1 + exp(-x)), 1 / a = b / (a b). Returns
// false where it does not serve, for a b is NaN, or so large that b over it would be too small.
__device__ __forceinline__ bool sigmoids(float& x, float& y, float l = 1.0f)
{
    constexpr float log2e = 1.4426950408889634f;
    const float a = exp2_(-log2e * x) * l + l, b = exp2_(-log2e * y) * l + l, inverse = reciprocal(a * b);
    x = b * inverse;
    y = a * inverse;
    return inverse > 0x1p-100f;
}
