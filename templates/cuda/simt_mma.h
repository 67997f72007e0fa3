// Fragments and their products on a CPU; a part of simt.h.
#pragma once

namespace simt {
template <bool TRANSPOSED>
static void ldmatrix_x4(u32 (&x)[4], u32 row)
{
    const unsigned char* mine = (const unsigned char*)shared + row;
    if (row + 16 > sizeof shared || row % 16)
        fail("a matrix row outside of shared memory, or not aligned", __LINE__);
    const Show* all = exchange(__LINE__ + TRANSPOSED, [&](Show& s) { s.row = mine; });
    const int g = current % WARP / 4, t = current % 4;
    for (int p = 0; p < 4; ++p)
        if (TRANSPOSED) {
            uint16_t low, high;
            memcpy(&low, all[8 * p + 2 * t].row + 2 * g, 2);
            memcpy(&high, all[8 * p + 2 * t + 1].row + 2 * g, 2);
            x[p] = low | u32(high) << 16;
        } else
            memcpy(&x[p], all[8 * p + g].row + 4 * t, 4);
}
}  // namespace simt

static inline u32 address(const void* place) { return u32((const unsigned char*)place - (const unsigned char*)shared); }
static inline void ldmatrix_x4(u32 (&x)[4], u32 row) { simt::ldmatrix_x4<false>(x, row); }
static inline void ldmatrix_x4_trans(u32 (&x)[4], u32 row) { simt::ldmatrix_x4<true>(x, row); }

static inline u32 load_word(u32 place)
{
    u32 x;
    if (place + 4 > sizeof shared || place % 4)
        simt::fail("a word outside of shared memory, or not aligned", __LINE__);
    memcpy(&x, (const unsigned char*)shared + place, 4);
    return x;
}

namespace simt {
constexpr int PARTS = 4 / sizeof(element);  // of a register

// The two are most of what a kernel does, and optimised whatever else is.
#define SIMT_FAST __attribute__((optimize("O2"), noinline))

SIMT_FAST static void show_operands(Show& s, const u32 (&a)[4], u32 b0, u32 b1)
{
    for (int i = 0; i < 6; ++i) {
        const u32 x = i < 4 ? a[i] : i == 4 ? b0 : b1;
        float* const to = i < 4 ? s.product.a + i * PARTS : s.product.b + (i - 4) * PARTS;
        for (int half = 0; half < PARTS; ++half) {
            const u32 bits = x >> 16 * half & 0xffff;
            to[half] = PARTS == 1      ? __builtin_bit_cast(float, x & 0xffffe000)  // tf32: what the last 13 bits are does not count
                       : is_f16<element> ? float(__builtin_bit_cast(_Float16, uint16_t(bits)))
                                         : __builtin_bit_cast(float, bits << 16);
        }
    }
}

SIMT_FAST static void multiply(float (&c)[4], const Show* all)
{
    const int g = current % WARP / 4, t = current % 4;
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 8 * PARTS; ++k) {  // registers a0, a1 and b0 hold the first half of the depth
            const int lane = k % (4 * PARTS) / PARTS, half = k / (4 * PARTS) * PARTS, i = k % PARTS;
            const float left = all[4 * g + lane].product.a[2 * half + e / 2 * PARTS + i];
            const float right = all[4 * (2 * t + e % 2) + lane].product.b[half + i];
            c[e] += left * right;
        }
}
}  // namespace simt

static inline void mma_sync(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    simt::multiply(c, simt::exchange(__LINE__, [&](simt::Show& s) { simt::show_operands(s, a, b0, b1); }));
}
