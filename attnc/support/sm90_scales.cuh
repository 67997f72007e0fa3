// Scales of the columns of a row of K or V, as its lane loads and keeps them.

// COUNT scales as they lie in memory: floats, or bytes.
template <class Stored, int COUNT>
struct Neighbours {
    u32 words[(COUNT * (int)sizeof(Stored) + 3) / 4] = {};
};

template <int COUNT>
__device__ __forceinline__ float get_scale(const Neighbours<float, COUNT>& scales, int i)
{
    return __uint_as_float(scales.words[i]);
}
template <int COUNT>
__device__ __forceinline__ int get_scale(const Neighbours<unsigned char, COUNT>& scales, int i)
{
    return scales.words[i / 4] >> 8 * (i % 4) & 255;
}

// Loads scales that lie `stride` apart: those next to each other, 16 bytes or 4 at once where they are aligned to that.
// Nothing is read where there are none.
template <class Stored, int COUNT>
__device__ __forceinline__ void load_scales(Neighbours<Stored, COUNT>& scales, const Stored* from, long long stride,
    bool exist)
{
    constexpr int SIZE = sizeof(Stored), BYTES = COUNT * SIZE, WORDS = BYTES / 4,
                  CHUNKS = BYTES % 16 == 0 ? BYTES / 16 : 0;
    Neighbours<Stored, COUNT> found;
    if (exist && stride == 1 && (u64)from % (CHUNKS > 0 ? 16 : 4) == 0) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const Chunk chunk = ((const Chunk*)from)[i];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                found.words[4 * i + j] = chunk.words[j];
        }
#pragma unroll
        for (int i = 4 * CHUNKS; i < WORDS; ++i)
            found.words[i] = ((const u32*)from)[i];
#pragma unroll
        for (int i = 4 * WORDS; i < BYTES; ++i)
            found.words[i / 4] |= (u32)((const unsigned char*)from)[i] << 8 * (i % 4);
    } else if (exist) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if constexpr (SIZE == 4)
                found.words[i] = ((const u32*)from)[i * stride];
            else
                found.words[i / 4] |= (u32)((const unsigned char*)from)[i * stride] << 8 * (i % 4);
    }
    scales = found;
}
