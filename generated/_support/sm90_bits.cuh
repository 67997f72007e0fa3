// Device functions of kernels whose masks read bits of words.

// 32 bits of two words, the lower one first, from bit `first % 32` of the lower one on.
__device__ __forceinline__ u32 bits_from(u32 low, u32 high, int first)
{
#ifndef ATTNC_SHIM
    return __funnelshift_r(low, high, first);
#else
    return (u32)(((u64)high << 32 | low) >> (first & 31));
#endif
}
