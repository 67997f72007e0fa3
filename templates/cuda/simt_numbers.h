// Numbers of 16 bits, and what CUDA says of numbers without an include; a part of simt.h, for every target.
#pragma once

struct bf16;
struct f16;
namespace simt {
template <class T> constexpr bool is_f16 = false;
template <> constexpr bool is_f16<f16> = true;

template <class T>
static float widen(T x)
{
    if (is_f16<T>) {
        _Float16 value;
        memcpy(&value, &x, 2);
        return float(value);
    }
    uint32_t word = 0;
    memcpy((char*)&word + 2, &x, 2);
    return __builtin_bit_cast(float, word);
}

// To nearest, ties to even.
template <class T>
static uint32_t narrow(float x)
{
    if (is_f16<T>)
        return __builtin_bit_cast(uint16_t, _Float16(x));
    const uint32_t word = __builtin_bit_cast(uint32_t, x);
    return x != x ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
}  // namespace simt

static inline u32 pack(float low, float high) { return simt::narrow<element>(low) | simt::narrow<element>(high) << 16; }
template <class T> static float to_float(T x) { return simt::widen(x); }
static inline float __uint_as_float(u32 x) { return __builtin_bit_cast(float, x); }
static inline u32 __float_as_uint(float x) { return __builtin_bit_cast(u32, x); }
template <class T> static T min(T a, T b) { return a < b ? a : b; }
template <class T> static T max(T a, T b) { return a > b ? a : b; }
static inline int abs(int x) { return x < 0 ? -x : x; }
static inline long long abs(long long x) { return x < 0 ? -x : x; }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float exp2_(float x) { return exp2f(x); }

template <class T>
static void round_to(T& y, float x)
{
    y.bits = (unsigned short)simt::narrow<T>(x);
}

static inline u32 pack_bf16(float low, float high) { return simt::narrow<bf16>(low) | simt::narrow<bf16>(high) << 16; }

static inline u32 less_halves(u32 x, u32 bound)
{
    return ((x & 0x7FFF) < (bound & 0xFFFF) ? 0xFFFF : 0) | ((x >> 16 & 0x7FFF) < bound >> 16 ? 0xFFFF0000 : 0);
}

// Four numbers of 4 bits of exponent and 3 of significand as f16; 15 with all ones is no number.
static inline void halves_of_e4m3(u32 four, u32 (&pairs)[2])
{
    pairs[0] = pairs[1] = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 code = four >> 8 * i & 0xff, exponent = code >> 3 & 15, significand = code & 7;
        const float size = exponent ? (8 + significand) * exp2f(int(exponent) - 10) : significand * exp2f(-9);
        const _Float16 x = (code & 0x7f) == 0x7f ? __builtin_nanf("") : size;
        pairs[i / 2] |= u32(__builtin_bit_cast(uint16_t, x) | (code & 0x80) << 8) << 16 * (i % 2);
    }
}

static inline u32 subtract_halves(u32 x, u32 y)
{
    u32 z = 0;
    for (int i = 0; i < 2; ++i) {
        const auto of = [&](u32 pair) { return __builtin_bit_cast(_Float16, uint16_t(pair >> 16 * i)); };
        z |= u32(__builtin_bit_cast(uint16_t, _Float16(of(x) - of(y)))) << 16 * i;
    }
    return z;
}
