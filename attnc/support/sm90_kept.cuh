// ds that one kernel keeps in memory, and another multiplies by k. A tile of 128 keys and 128 queries holds fragments
// of ds^T, 16 keys and 16 queries each, one behind the other: 16 bytes of every lane.
constexpr int KEPT_TILE = 128, KEPT_FRAGMENT = 32 * 16, KEPT_BYTES = KEPT_TILE * KEPT_TILE * 2;

// Where this lane has its part of the fragment at a key and a query, in bytes.
__device__ __forceinline__ int kept_at(int key, int query)
{
    return (key / 16 * (KEPT_TILE / 16) + query / 16) * KEPT_FRAGMENT + threadIdx.x % 32 * 16;
}

#ifndef ATTNC_SHIM

// Of all lanes.
__device__ __forceinline__ int warp_sum(int x) { return __reduce_add_sync(0xffffffffu, x); }

// A matrix of 8 rows and 8 columns, of 16 bits each, turned around: lane i has columns 2 (i % 4) and + 1 of row i / 4,
// before and after (PTX ISA, "movmatrix").
__device__ __forceinline__ u32 turned(u32 x)
{
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

#endif

// How many blocks before this one have a bit in a row of words. All lanes of a warp ask together.
__device__ __forceinline__ int count_before(const int* row, int block)
{
    int found = 0;
#pragma unroll 1
    for (int word = threadIdx.x % 32; word <= block / 32; word += 32)
        found += count_bits((u32)row[word] & (word < block / 32 ? 0xffffffffu : (1u << block % 32) - 1));
    return warp_sum(found);
}
