// Scales of the columns of a row that its own lanes convert: of one half of a tile at a time, as they lie in memory.

// COUNT scales of a type that is kept one by one.
template <class Value, int COUNT>
struct Apart {
    Value values[COUNT] = {};
};

template <class Value, int COUNT>
__device__ __forceinline__ Value get_scale(const Apart<Value, COUNT>& scales, int i)
{
    return scales.values[i];
}
template <class Value, int COUNT>
__device__ __forceinline__ void put_scale(Apart<Value, COUNT>& scales, int i, Value x)
{
    scales.values[i] = x;
}
template <int COUNT>
__device__ __forceinline__ void put_scale(Neighbours<float, COUNT>& scales, int i, float x)
{
    scales.words[i] = word_of(x);
}
template <int COUNT>
__device__ __forceinline__ void put_scale(Neighbours<unsigned char, COUNT>& scales, int i, unsigned char x)
{
    scales.words[i / 4] = (i % 4 == 0 ? 0 : scales.words[i / 4]) | (u32)x << 8 * (i % 4);
}

// Loads COUNT scales, the one of block `block_of(i)` as number i; zeros, without a read, if `from` is null or there are
// not so many blocks. WHOLE: scales lie side by side, words of them at multiples of 4 bytes; FOLLOW: blocks do, from
// a multiple of COUNT on. Bytes are then read as words, of which one may end behind the last scale.
template <bool WHOLE, bool FOLLOW, class Stored, int COUNT, class BlockOf>
__device__ __forceinline__ void load_row_scales(Neighbours<Stored, COUNT>& scales, const Stored* from, long long stride,
    BlockOf block_of, int blocks = 1 << 30)
{
    constexpr int SIZE = sizeof(Stored);
    if constexpr (WHOLE && FOLLOW && COUNT * SIZE % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT * SIZE / 4; ++i) {
            const int block = block_of(4 / SIZE * i);
            scales.words[i] = from != nullptr && block < blocks ? *(const u32*)(from + block) : 0;
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool exists = from != nullptr && block_of(i) < blocks;
            put_scale(scales, i, exists ? from[block_of(i) * (WHOLE ? 1 : stride)] : Stored{});
        }
    }
}

// 2^(x - 127), of 0 to 255: infinity of 255, and 0 of 0.
__device__ __forceinline__ float power_of(int x) { return __uint_as_float((u32)x << 23); }

// A pair of elements times a power of two. Of bf16 that is exact, or what float32 would be rounded to.
__device__ __forceinline__ u32 times_power(f16, u32 pair, float power)
{
    return pack(to_float(f16{(unsigned short)pair}) * power, to_float(f16{(unsigned short)(pair >> 16)}) * power);
}
__device__ __forceinline__ u32 times_power(bf16, u32 pair, float power)
{
#ifdef ATTNC_SHIM
    return pack(to_float(bf16{(unsigned short)pair}) * power, to_float(bf16{(unsigned short)(pair >> 16)}) * power);
#else
    u32 made;  // a bf16 is the first half of a float
    const u32 powers = permute_bytes(word_of(power), word_of(power), 0x7632);  // two of them
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(made) : "r"(pair), "r"(powers));
    return made;
#endif
}

// Stores 16 numbers as elements, times a power of two.
template <class Stored>
__device__ __forceinline__ void store_times_power(const RowPlace& place, u32 offset, const Chunk& stored, float power)
{
    Chunk made[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 pairs[2];
        to_halves(Stored{}, stored.words[i], pairs);
#pragma unroll
        for (int j = 0; j < 2; ++j)
            made[i / 2].words[i % 2 * 2 + j] = times_power(element{}, to_elements(element{}, pairs[j]), power);
    }
    store_row(place, offset, made);
}
