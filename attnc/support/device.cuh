// What kernels of all architectures have in common: types, and functions of numbers, lanes and sorted rows.
//
// A kernel defines ELEMENT, the type of q, k and v (bf16, f16 or float; for float ELEMENT_IS_F32 too), and includes the header of its
// architecture, which includes this one; attnc.support.binaries puts the texts in the place of those lines. On a CPU, simt.h stands
// in for the instructions that C++ has no words for.

typedef unsigned int u32;
typedef unsigned long long u64;
struct bf16 { unsigned short bits; };  // storage only: arithmetic is in float
struct f16 { unsigned short bits; };
typedef ELEMENT element;
struct alignas(16) Chunk { u32 words[4]; };
struct alignas(8) Pair { float values[2]; };
struct alignas(16) Four { float values[4]; };
struct alignas(64) TensorMap { u64 words[16]; };  // made by the driver, read by TMA

[[maybe_unused]] constexpr float INF = __builtin_bit_cast(float, 0x7f800000);

#define TEXT(x) #x
#define TEXT_OF(x) TEXT(x)
#ifndef ELEMENT_IS_F32
#define ROUND_PAIR "cvt.rn." TEXT_OF(ELEMENT) "x2.f32"
#endif

#ifdef ATTNC_SHIM
#include "simt.h"
#else

// Of a place in shared memory.
__device__ u32 address(const void* place) { return (u32)__cvta_generic_to_shared(place); }

#ifdef ROUND_PAIR
// Two floats rounded to 16 bits, the first in the low half.
__device__ u32 pack(float low, float high)
{
    u32 pair;
    asm(ROUND_PAIR " %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

__device__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ float to_float(f16 x)
{
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ float exp2_(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The value of the lane whose number differs in the bits of `mask`.
__device__ float from_lane(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// The value of lane `lane`.
__device__ int of_lane(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// Of all threads of the block, which meet here.
__device__ bool any_thread(bool x) { return __syncthreads_or(x); }

__device__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

__device__ void atomic_add(float* to, float x) { asm volatile("red.global.add.f32 [%0], %1;" :: "l"(to), "f"(x) : "memory"); }

__device__ void round_to(bf16& y, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ void round_to(f16& y, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }

__device__ u32 from_lane_u32(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }


#endif

__device__ void round_to(float& y, float x) { y = x; }

// Keeps a condition a branch: the compiler would rather evaluate both sides.
__device__ void branch() { asm volatile("" ::: "memory"); }

// Over the four lanes that share a row.
__device__ float row_max(float x)
{
    x = fmaxf(x, from_lane(x, 1));
    return fmaxf(x, from_lane(x, 2));
}

__device__ float row_sum(float x)
{
    x += from_lane(x, 1);
    return x + from_lane(x, 2);
}

// The sequence that tile `tile` of `size` rows is cut from: the last one whose tile numbers begin at `tile` or before.
// Sequence b has those from cu_seqlens[b] / size + b on, at least as many as tiles; number B is what follows the last one.
template <class Value>
__device__ int find_sequence(const Value* cu_seqlens, long long stride, int tile, int B, int size)
{
    int lo = 0, hi = B;
    while (lo < hi) {
        const int middle = (lo + hi + 1) / 2;
        if (cu_seqlens[middle * stride] / size + middle <= tile)
            lo = middle;
        else
            hi = middle - 1;
    }
    return lo;
}

// tanh(x) = 1 - 2 / (exp(2x) + 1), by the hardware's exp2; absolute error below 2^-21.
__device__ float tanh_(float x)
{
    constexpr float two_log2e = 2.8853900817779268f;
    return 1.0f - __fdividef(2.0f, exp2_(x * two_log2e) + 1.0f);
}

// 1 / (1 + exp(-x)), by the hardware's exp2; 0 where that overflows.
__device__ float sigmoid_(float x)
{
    constexpr float log2e = 1.4426950408889634f;
    return __fdividef(1.0f, 1.0f + exp2_(-log2e * x));
}

// NaN if one of them is.
__device__ float min_(float x, float y) { return x < y || x != x ? x : y; }

// NaN if one of them is.
__device__ float max_(float x, float y) { return x > y || x != x ? x : y; }

template <class Value>
__device__ Value where(bool condition, Value then, Value otherwise) { return condition ? then : otherwise; }

// Floor division; `/` truncates towards zero. By 0 it gives 0.
template <class A, class B>
__device__ auto floor_div(A x, B size) -> decltype(x / size)
{
    const auto quotient = size == 0 ? 0 : x / size;
    return quotient - (quotient * size != x && (x < 0) != (size < 0));
}

template <class A, class B>
__device__ auto floor_mod(A x, B size) -> decltype(x / size) { return size == 0 ? 0 : x - floor_div(x, size) * size; }

#ifndef LANES_SEARCH
// First position in the sorted row whose element is >= value; `length` when there is none.
template <class Value>
__device__ int lower_bound(const Value* row, long long stride, int length, long long value)
{
    int lo = 0, hi = length;
    while (lo < hi) {
        const int middle = (lo + hi) / 2;
        if (row[middle * stride] < value)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

// First position in the sorted row whose element is >= value; `length` when there is none.
template <class Value>
__device__ int lower_bound_real(const Value* row, long long stride, int length, float value)
{
    int lo = 0, hi = length;
    while (lo < hi) {
        const int middle = (lo + hi) / 2;
        if (row[middle * stride] < value)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

// First position in the sorted row whose element is > value; `length` when there is none.
template <class Value>
__device__ int upper_bound(const Value* row, long long stride, int length, long long value)
{
    int lo = 0, hi = length;
    while (lo < hi) {
        const int middle = (lo + hi) / 2;
        if (row[middle * stride] <= value)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

// First position in the sorted row whose element is > value; `length` when there is none.
template <class Value>
__device__ int upper_bound_real(const Value* row, long long stride, int length, float value)
{
    int lo = 0, hi = length;
    while (lo < hi) {
        const int middle = (lo + hi) / 2;
        if (row[middle * stride] <= value)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}
#endif

// Which of four neighbouring elements dropout keeps, as four bits: words of Philox-4x32-10 (Salmon et al., SC 2011) at
// (kv_idx / 4, q_idx, h, b). A pure function of the seed and the element, whatever the tiling.
__device__ u32 draw_four(float p, long long key, int b, int h, int q_idx, int kv_idx)
{
    u32 key0 = (u32)key, key1 = (u32)(key >> 32);
    u32 c0 = kv_idx / 4, c1 = q_idx, c2 = h, c3 = b;
    for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        const unsigned long long product0 = 0xD2511F53ull * c0, product1 = 0xCD9E8D57ull * c2;
        c0 = (u32)(product1 >> 32) ^ c1 ^ key0;
        c1 = (u32)product1;
        c2 = (u32)(product0 >> 32) ^ c3 ^ key1;
        c3 = (u32)product0;
    }
    const u32 words[4] = {c0, c1, c2, c3};
    u32 kept = 0;
    for (int i = 0; i < 4; ++i)
        kept |= ((words[i] >> 8) * 5.9604644775390625e-08f >= p) << i;
    return kept;
}
