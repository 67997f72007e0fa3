// Rows of K of 8 bits that reach the tiles of 16 bits by way of registers: a lane loads numbers of later rows while it
// converts those of earlier ones. So shared memory holds the tiles that wgmma reads, and no others.

#ifndef ATTNC_SHIM

// The number of a lane, which is cheaper to read again than to keep beside the numbers that a lane holds.
__device__ __forceinline__ u32 read_lane()
{
    u32 lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// 16 bytes of global memory that lie at a multiple of 16; zeros, without a read, if they do not exist.
__device__ __forceinline__ Chunk load_whole(const unsigned char* from, bool exist)
{
    Chunk x = {};
    asm volatile("{ .reg .pred exist; setp.ne.s32 exist, %5, 0;\n"
                 "@exist ld.global.L1::no_allocate.v4.b32 { %0, %1, %2, %3 }, [%4]; }"
                 : "+r"(x.words[0]), "+r"(x.words[1]), "+r"(x.words[2]), "+r"(x.words[3])
                 : "l"(from), "r"((int)exist) : "memory");
    return x;
}

// 16 bytes that lie at a multiple of 8; zeros for those behind the first `bytes`, of which none, half or all are read.
__device__ __forceinline__ Chunk load_halves(const unsigned char* from, int bytes)
{
    Chunk x = {};
    asm volatile("{ .reg .pred first, second; setp.ge.s32 first, %5, 8; setp.ge.s32 second, %5, 16;\n"
                 "@first ld.global.v2.b32 { %0, %1 }, [%4];\n"
                 "@second ld.global.v2.b32 { %2, %3 }, [%4 + 8]; }"
                 : "+r"(x.words[0]), "+r"(x.words[1]), "+r"(x.words[2]), "+r"(x.words[3])
                 : "l"(from), "r"(bytes) : "memory");
    return x;
}

#endif

// A warp converts eight rows of 64 columns at a time, a lane 16 columns of one row. Eight lanes that access shared
// memory together have half of row r and half of row r ^ 5: other banks for each in a swizzled tile.
__device__ __forceinline__ int gathered_row()
{
    const u32 lane = read_lane();
    return lane / 8 ^ lane / 4 % 2 * 5;
}
__device__ __forceinline__ int gathered_column() { return read_lane() % 4 * 16; }

// Columns `column` + OFFSET to column + OFFSET + 15 of a row of so many. WHOLE: rows lie at multiples of 16 bytes, and
// columns are a multiple of 64; else both of 8.
template <bool WHOLE>
__device__ __forceinline__ Chunk load_columns(const unsigned char* row, int column, int offset, int columns)
{
    const unsigned char* const from = row + column;
    if constexpr (WHOLE)
        return load_whole(from + offset, row != nullptr);
    else
        return load_halves(from + offset, row == nullptr ? 0 : columns - column - offset);
}

// Where a lane stores its 16 elements of eight rows of a panel: two chunks, as far from each other in all panels.
struct RowPlace { u32 first, second; };
__device__ __forceinline__ RowPlace row_place(u32 rows)
{
    const int row = gathered_row(), chunk = gathered_column() / 8;  // even, so that the next one is the other of a pair
    const u32 first = rows + row * 128 + (chunk ^ row) * 16;
    return {first, first ^ 16};
}

// Stores a lane's 16 elements; `offset`: of these rows, in bytes.
__device__ __forceinline__ void store_row(const RowPlace& place, u32 offset, const Chunk (&made)[2])
{
    store_shared(place.first + offset, made[0]);
    store_shared(place.second + offset, made[1]);
}

// Stores 16 numbers as elements.
template <class Stored>
__device__ __forceinline__ void store_converted(const RowPlace& place, u32 offset, const Chunk& stored)
{
    Chunk made[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 pairs[2];
        to_halves(Stored{}, stored.words[i], pairs);
        made[i / 2].words[i % 2 * 2] = to_elements(element{}, pairs[0]);
        made[i / 2].words[i % 2 * 2 + 1] = to_elements(element{}, pairs[1]);
    }
    store_row(place, offset, made);
}

// The same, times a scale, in float32, rounded once.
template <class Stored>
__device__ __forceinline__ void store_scaled(const RowPlace& place, u32 offset, const Chunk& stored, float scale)
{
    Chunk made[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 pairs[2];
        to_halves(Stored{}, stored.words[i], pairs);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float low = to_float(f16{(unsigned short)pairs[j]});
            const float high = to_float(f16{(unsigned short)(pairs[j] >> 16)});
            made[i / 2].words[i % 2 * 2 + j] = pack(low * scale, high * scale);
        }
    }
    store_row(place, offset, made);
}
