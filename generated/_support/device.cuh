// What kernels of all architectures have in common: types, and functions of numbers, lanes and sorted rows.
//
// A kernel defines ELEMENT, the type of q, k and v (bf16, f16 or float; for float ELEMENT_IS_F32 too), and includes the
// header of its architecture, which includes this one; attnc.support.binaries puts the texts in the place of those
// lines. On a CPU, simt.h stands in for the instructions that C++ has no words for.

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
__device__ float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// The value of lane `lane`.
__device__ int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// Of all threads of the block, which meet here.
__device__ bool any_thread(bool x) { return __syncthreads_or(x); }

__device__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

__device__ void atomic_add(float* to, float x)
{
    asm volatile("red.global.add.f32 [%0], %1;" :: "l"(to), "f"(x) : "memory");
}

__device__ void round_to(bf16& y, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ void round_to(f16& y, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }

__device__ u32 shuffle_xor_u32(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// Ones in a half whose last 15 bits are less than those of `bound`, which is 0x4000 at most: as positive f16 they have
// the same order.
__device__ u32 less_halves(u32 x, u32 bound)
{
    u32 y;
    asm("{ .reg .b32 size; abs.f16x2 size, %1; set.lt.u32.f16x2 %0, size, %2; }" : "=r"(y) : "r"(x), "r"(bound));
    return y;
}

#endif

__device__ void round_to(float& y, float x) { y = x; }

// Keeps a condition a branch: the compiler would rather evaluate both sides.
__device__ void branch() { asm volatile("" ::: "memory"); }

// Over the four lanes that share a row.
__device__ float row_max(float x)
{
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
}

__device__ float row_sum(float x)
{
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// The sequence that tile `tile` of `size` rows is cut from: the last one whose tile numbers begin at `tile` or before.
// Sequence b has those from cu_seqlens[b] / size + b on, at least as many as tiles; number B is what follows the last
// one.
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

// ---- dropout: 15 bits of Philox-4x32-7 decide about an element. The call at (kv_idx / 16, q_idx, h, b) has those of
// sixteen keys: of key i they are half i % 2, without its first bit, of word i / 4, turned left by 8 bits where i / 2
// is odd. A pure function of the seed and the element, whatever the tiling.

// Counters become words (Salmon et al., SC 2011: of 4 x 32 bits, 7 rounds are the fewest that pass BigCrush). COUNT of
// them hide each other's latency, and share the keys of rounds.
template <int COUNT>
__device__ void philox(u32 (&x)[COUNT][4], u32 key0, u32 key1)
{
#pragma unroll
    for (int round = 0; round < 7; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const u64 product0 = 0xD2511F53ull * x[i][0], product1 = 0xCD9E8D57ull * x[i][2];
            x[i][0] = (u32)(product1 >> 32) ^ x[i][1] ^ key0;
            x[i][1] = (u32)product1;
            x[i][2] = (u32)(product0 >> 32) ^ x[i][3] ^ key1;
            x[i][3] = (u32)product0;
        }
}

// What 15 bits are compared with: those below `bound`, in both halves, are dropped, or the only ones that are kept,
// where that is fewer.
struct Draw {
    u32 bound;
    bool keeps_below;
    __device__ explicit Draw(float p) : keeps_below(!(p <= 0.5f))
    {
        const float below = floorf((keeps_below ? 1.0f - p : p) * 32768.0f + 0.5f);
        bound = below > 0.0f ? (u32)below * 0x10001u : 0;
    }
    // Ones in a half whose key is kept, among those `of` a mask.
    __device__ u32 kept(u32 below, u32 of = ~0u) const { return keeps_below ? below & of : ~below & of; }
};

// Which of sixteen keys are below the bound, by bits: key 8 x + 2 y + z is bit 4 y + 2 x + z; BY_KEY: key 8 x + y is
// bit 2 y + x.
template <bool BY_KEY>
__device__ u32 draw_sixteen(const Draw& draw, long long key, int b, int h, int q_idx, int kv_idx)
{
    u32 x[1][4] = {{(u32)(kv_idx / 16), (u32)q_idx, (u32)h, (u32)b}}, below = 0;
    philox(x, (u32)key, (u32)(key >> 32));
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
        const u32 word = x[0][pair / 2], bit = 4 * (pair % 4) + (BY_KEY ? 1 : 2) * (pair / 4);
        below |= less_halves(pair % 2 ? word << 8 | word >> 24 : word, draw.bound) & 0x10001u << bit;
    }
    return draw.kept((below & 0xFFFF) | below >> 16 << (BY_KEY ? 2 : 1), 0xFFFF);
}

// Lanes whose numbers differ in the bit `lane` trade halves of their bits: one gives those outside `low`, and gets
// those inside, as far below as `shift`.
__device__ u32 trade_bits(u32 x, int lane, int shift, u32 low)
{
    const u32 other = shuffle_xor_u32(x, lane);
    return threadIdx.x & lane ? (x & ~low) | (other >> shift & low) : (x & low) | (other << shift & ~low);
}

// Which of a row's keys are kept, up to 128 from kv_lo on: four lanes have columns 8 j + 2 t and the next, bits 2 j and
// 2 j + 1 here. Each draws for sixteen of every 64.
template <int COLUMNS>
__device__ u32 draw_keys(const Draw& draw, long long key, int b, int h, int q_idx, int kv_lo)
{
    u32 kept = 0;
    for (int i = 0; 64 * i < COLUMNS; ++i)
        kept |= draw_sixteen<false>(draw, key, b, h, q_idx, kv_lo + 64 * i + 16 * (threadIdx.x % 4)) << 16 * i;
    return trade_bits(trade_bits(kept, 2, 8, 0x00FF00FFu), 1, 4, 0x0F0F0F0Fu);
}

// Which are kept of two rows that are keys, kv_idx and that + 8: eight lanes have neighbouring keys, and queries q_lo +
// 8 j + 2 t and the next for columns, bits 4 j + r and 4 j + 2 + r of 16 j to a word. Each draws for one of eight of
// their queries.
template <int COLUMNS>
__device__ void draw_queries(u32 (&kept)[(COLUMNS + 63) / 64], const Draw& draw, long long key, int b, int h, int q_lo,
    int kv_idx)
{
    const int g = threadIdx.x % 32 / 4;
    for (int i = 0; 64 * i < COLUMNS; ++i) {
        const int q_idx = q_lo + 64 * i + 8 * (g / 2) + 2 * (threadIdx.x % 4) + g % 2;
        u32 drawn = draw_sixteen<true>(draw, key, b, h, q_idx, kv_idx);
        if (64 * i + 32 < COLUMNS)
            drawn |= draw_sixteen<true>(draw, key, b, h, q_idx + 32, kv_idx) << 16;
        kept[i] = trade_bits(trade_bits(trade_bits(drawn, 16, 8, 0x00FF00FFu), 8, 4, 0x0F0F0F0Fu), 4, 2, 0x33333333u);
    }
}
