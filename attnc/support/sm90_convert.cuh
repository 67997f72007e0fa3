// Tiles of K and V of 8 bits, converted to the 16 bits that wgmma multiplies. Each of their numbers is one of f16, and
// of bf16, so nothing is rounded.

// Types of 8 bits, for storage only.
struct e4m3 { unsigned char bits; };
struct e5m2 { unsigned char bits; };
struct i8 { unsigned char bits; };

#ifndef ATTNC_SHIM

__device__ __forceinline__ void halves_of_e4m3(u32 four, u32 (&pairs)[2])
{
    asm("{ .reg .b16 x, y; mov.b32 {x, y}, %2; cvt.rn.f16x2.e4m3x2 %0, x; cvt.rn.f16x2.e4m3x2 %1, y; }"
        : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(four));
}

__device__ __forceinline__ u32 subtract_halves(u32 x, u32 y)
{
    u32 z;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

// Copies so many of 16 bytes from global to shared memory, eight by eight, which rows of 8 bits are aligned to; then
// zeros, without a read.
__device__ __forceinline__ void copy_async_halves(u32 to, const void* from, int bytes)
{
    asm volatile("{ cp.async.ca.shared.global [%0], [%1], 8, %2;\n"
                 "cp.async.ca.shared.global [%0 + 8], [%1 + 8], 8, %3; }"
                 :: "r"(to), "l"(from), "r"(min(bytes, 8)), "r"(max(bytes - 8, 0)) : "memory");
}

#endif

// Four numbers of 8 bits as two pairs of f16.
__device__ __forceinline__ void to_halves(e4m3, u32 four, u32 (&pairs)[2]) { halves_of_e4m3(four, pairs); }

// The first half of an f16 is an e5m2.
__device__ __forceinline__ void to_halves(e5m2, u32 four, u32 (&pairs)[2])
{
    pairs[0] = permute_bytes(0, four, 0x5040);
    pairs[1] = permute_bytes(0, four, 0x7060);
}

// 128 more, without a sign, is the significand of 1024 + that number.
__device__ __forceinline__ void to_halves(i8, u32 four, u32 (&pairs)[2])
{
    const u32 bytes = four ^ 0x80808080u;
    pairs[0] = subtract_halves(permute_bytes(bytes, 0x64646464u, 0x7170), 0x64806480u);
    pairs[1] = subtract_halves(permute_bytes(bytes, 0x64646464u, 0x7372), 0x64806480u);
}

// A pair of f16 as one of elements. A bf16 is the first half of an f32, of which the other is 0 here.
__device__ __forceinline__ u32 to_elements(f16, u32 pair) { return pair; }
__device__ __forceinline__ u32 to_elements(bf16, u32 pair)
{
    const float low = to_float(f16{(unsigned short)pair}), high = to_float(f16{(unsigned short)(pair >> 16)});
    return permute_bytes(word_of(low), word_of(high), 0x7632);
}

// Eight numbers of 8 bits in memory, as floats, which hold them exactly.
template <class Stored>
__device__ __forceinline__ void load_eight(const Stored* from, float (&x)[8])
{
    const u64 eight = *(const u64*)from;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u32 pairs[2];
        to_halves(Stored{}, (u32)(eight >> 32 * i), pairs);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            x[4 * i + j] = to_float(f16{(unsigned short)(pairs[j / 2] >> 16 * (j % 2))});
    }
}

// Eight elements in memory, as floats.
__device__ __forceinline__ void load_eight(const element* from, float (&x)[8])
{
    const Chunk eight = *(const Chunk*)from;
#pragma unroll
    for (int j = 0; j < 8; ++j)
        x[j] = to_float(element{(unsigned short)(eight.words[j / 2] >> 16 * (j % 2))});
}

// Which of the panels of a tile a warp converts: all of them, in their order.
struct AllPanels {
    __device__ __forceinline__ int operator()(int i) const { return i; }
};

// Converts ROWS rows of a tile, by one warp: PANELS panels of 64 columns, those of the numbers `panel_of(i)`,
// which begin at columns `column_of(panel)` of the rows in memory. from: rows of 8 bits, in panels of 128 columns;
// to: rows of elements, in panels of 64; both are swizzled by TMA's 128 bytes, and panels lie `pitch` bytes apart.
// ROWS and the number of the first row are multiples of 8.
template <class Stored, int ROWS, int PANELS, class ColumnOf, class PanelOf = AllPanels>
__device__ __forceinline__ void convert_rows(u32 from, u32 to, int pitch, ColumnOf column_of, PanelOf panel_of = {})
{
    // Eight lanes that access shared memory together have half of row r and of row r ^ 5: other banks for each, in the
    // tile that they read and in that which they write.
    const int lane = threadIdx.x % 32, row = lane / 8 ^ lane / 4 % 2 * 5, chunk = lane % 4;
    constexpr int RUNS = ROWS / 8, STEPS = PANELS * RUNS;  // of eight rows of a panel
    auto load = [&](int step) {
        const int half = column_of(panel_of(step / RUNS)) / 64;
        const u32 rows = from + half / 2 * pitch + step % RUNS * 1024 + row * 128;
        return load_shared<Chunk>(rows + ((half % 2 * 4 + chunk) ^ row) * 16);
    };
    Chunk next = load(0);  // one ahead: a warp waits for a load while it converts another
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const Chunk stored = next;
        if (step + 1 < STEPS)
            next = load(step + 1);
        const u32 rows = to + panel_of(step / RUNS) * pitch + step % RUNS * 1024 + row * 128;
        Chunk made[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 pairs[2];
            to_halves(Stored{}, stored.words[i], pairs);
            made[i / 2].words[i % 2 * 2] = to_elements(element{}, pairs[0]);
            made[i / 2].words[i % 2 * 2 + 1] = to_elements(element{}, pairs[1]);
        }
        store_shared(rows + (2 * chunk ^ row) * 16, made[0]);
        store_shared(rows + ((2 * chunk + 1) ^ row) * 16, made[1]);
    }
}

// Rows of K or V of one head, in pages: the first of page 0; strides in bytes.
struct BytePool {
    const unsigned char* first;
    long long page_stride, stride;
};

template <class Stored>
__device__ __forceinline__ BytePool byte_pool(const Stored* first, long long page_stride, long long stride)
{
    return {(const unsigned char*)first, page_stride * (int)sizeof(Stored), stride * (int)sizeof(Stored)};
}

// Starts copying ROWS rows of BYTES bytes, by one warp, to where TMA would have put them: panels of 128 bytes, which
// lie `pitch` bytes apart. mine: the address of row `lane`; 0: a row of zeros.
template <int BYTES, int ROWS>
__device__ __forceinline__ void copy_own_rows(u32 to, int pitch, u64 mine)
{
    const int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll 1
    for (int r = 0; r < ROWS; r += 4) {
        const int row = r + lane / 8;
        const u64 from = (u64)(u32)shuffle((int)(mine >> 32), row) << 32 | (u32)shuffle((int)mine, row);
        const u32 place = to + row * 128 + (chunk ^ (row & 7)) * 16;
#pragma unroll
        for (int panel = 0; panel < (BYTES + 127) / 128; ++panel) {
            const int at = 128 * panel + 16 * chunk, left = from == 0 ? 0 : max(min(BYTES - at, 16), 0);
            copy_async_halves(place + panel * pitch, (const unsigned char*)from + at, left);
        }
    }
}
