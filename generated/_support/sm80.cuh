// What kernels for sm_80 and newer have in common: copies to shared memory, products of matrices by mma.sync, and rows.
//
// A kernel also defines its sizes BLOCK_M, BLOCK_N, WARPS and STAGES, and ALIGNED.
#include "device.cuh"

constexpr int THREADS = 32 * WARPS;

#ifdef ELEMENT_IS_F32
#define MMA_SYNC "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
#else
#define MMA_SYNC "mma.sync.aligned.m16n8k16.row.col.f32." TEXT_OF(ELEMENT) "." TEXT_OF(ELEMENT) ".f32"
#endif

#ifndef ATTNC_SHIM

// 16 bytes from global to shared memory, zeros if not `inside`; there after a wait for the group of the copy.
__device__ void copy_async(void* to, const void* from, bool inside)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(address(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most GROUPS of the newest groups of this thread's copies are under way.
template <int GROUPS>
__device__ void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory"); }

// Four 8 x 8 matrices; lane i gives row i % 8 of matrix i / 8. x of a matrix: row lane / 4, columns 2 (lane % 4) and
// the next.
__device__ void ldmatrix_x4(u32 (&x)[4], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

// The same, each matrix transposed.
__device__ void ldmatrix_x4_trans(u32 (&x)[4], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

// A word of shared memory.
__device__ u32 load_word(u32 place)
{
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(place) : "memory");
    return x;
}

// c += a b, 16 x 8 += 16 x 16 times 16 x 8; of tf32, f32 whose last 13 bits do not count, 16 x 8 times 8 x 8.
// c: rows lane / 4 (0, 1) and lane / 4 + 8 (2, 3), columns 2 (lane % 4) and the next.
__device__ void mma_sync(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    asm(MMA_SYNC
        " { %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

// Rows of one head: row i lies i strides behind the first.
template <class Value>
struct Rows {
    Value* first;
    long long stride;
    __device__ Value* at(int row) const { return first + row * stride; }
};

// Rows of heads that share keys: row i is query i / group of head i % group.
template <class Value>
struct Heads {
    Value* first;
    long long stride, head_stride;
    int group;
    __device__ Value* at(int row) const { return first + row / group * stride + row % group * head_stride; }
};

// Starts copying 16 bytes to shared memory; zeros if not `inside`.
__device__ void copy_chunk(element* to, const element* from, bool inside)
{
#if ALIGNED
    copy_async(to, from, inside);
#else
    for (int i = 0; i < 16 / sizeof(element); ++i)
        to[i] = inside ? from[i] : element{0};
#endif
}

__device__ void store_chunk(element* to, const element* from)
{
#if ALIGNED
    *(Chunk*)to = *(const Chunk*)from;
#else
    for (int i = 0; i < 16 / sizeof(element); ++i)
        to[i] = from[i];
#endif
}

// Over the eight lanes that share a column.
__device__ float column_sum(float x)
{
    x += shuffle_xor(x, 4);
    x += shuffle_xor(x, 8);
    return x + shuffle_xor(x, 16);
}

// Over all threads of the block, in a fixed order; for thread 0. `sums` is read when it returns to all.
__device__ float block_sum(float x, float* sums)
{
    for (int mask = 16; mask > 0; mask /= 2)
        x += shuffle_xor(x, mask);
    __syncthreads();  // all have read the previous sums
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
    for (int warp = 0; warp < WARPS; ++warp)
        x += sums[warp];
    return x;
}

#ifdef ELEMENT_IS_F32
// An f32 is the sum of two tf32 of 11 significant bits, large + small, up to 2^-22 of it. 3xTF32 (Ootomo, Yokota,
// IJHPCA 2022) multiplies such sums: large large + (small large + large small); small small is 2^-22 of the product.
struct Operand { u32 large[4], small[4]; };

// A float whose first 11 bits, the rest cut off, are at most 2^-11 of x away from it.
__device__ float upwards(float x) { return fmaf(x, 0x1p-11f, x); }

__device__ void split(Operand& x, int i, float value)
{
    x.large[i] = __float_as_uint(upwards(value)) & 0xffffe000u;
    x.small[i] = __float_as_uint(upwards(value - __uint_as_float(x.large[i])));
}

// Four 8 x 4 matrices, as ldmatrix_x4 loads them: of a left operand, or of two right ones.
__device__ void load_operand(Operand& x, u32 row)
{
    u32 words[4];
    ldmatrix_x4(words, row);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        split(x, i, __uint_as_float(words[i]));
}

// Two right operands whose depth runs along rows: depth t is row 2t of 8, depth t + 4 is row 2t + 1, as in fragments of
// an accumulator. `first`, `next`: the addresses of column lane / 4 in rows 2 (lane % 4) and 2 (lane % 4) + 1.
__device__ void load_columns(Operand& x, u32 first, u32 next)
{
    split(x, 0, __uint_as_float(load_word(first)));
    split(x, 1, __uint_as_float(load_word(next)));
    split(x, 2, __uint_as_float(load_word(first ^ 32)));  // 8 columns on
    split(x, 3, __uint_as_float(load_word(next ^ 32)));
}

// The same as one left operand: row r of it is column r.
__device__ void load_turned_columns(Operand& x, u32 first, u32 next)
{
    split(x, 0, __uint_as_float(load_word(first)));
    split(x, 1, __uint_as_float(load_word(first ^ 32)));
    split(x, 2, __uint_as_float(load_word(next)));
    split(x, 3, __uint_as_float(load_word(next ^ 32)));
}

// A fragment of an accumulator as left operand, in the order of depths of load_columns.
__device__ void to_operand(Operand& x, const float (&fragment)[4])
{
#pragma unroll
    for (int i = 0; i < 4; ++i)
        split(x, i, fragment[i % 2 * 2 + i / 2]);
}

// c + small += a b, for half `half` of b.
__device__ void mma_sync(float (&c)[4], float (&small)[4], const Operand& a, const Operand& b, int half)
{
    mma_sync(small, a.small, b.large[2 * half], b.large[2 * half + 1]);
    mma_sync(small, a.large, b.small[2 * half], b.small[2 * half + 1]);
    mma_sync(c, a.large, b.large[2 * half], b.large[2 * half + 1]);
}

// What the small parts add; of infinities they are NaN, and c alone is right.
__device__ float correction(float small) { return fabsf(small) < INF ? small : 0.0f; }
#endif
