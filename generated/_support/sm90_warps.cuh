// Products of a warp with rows of K and V as they lie in memory, of 8 bits or of 16: 16 rows of queries, and
// WARP_N = 32 keys. Tiles are panels of 128 bytes a row, swizzled by TMA's 128 bytes; a warp reads rows of its own, and
// numbers of 8 bits become elements on the way to mma, in registers. Each is one of f16, and of bf16, so nothing is
// rounded.

#ifndef ATTNC_SHIM

// Four 8 x 8 matrices, each transposed; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&x)[4], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}

// c += a b, 16 x 8 += 16 x 16 times 16 x 8, in fragments as of an accumulator of wgmma.
__device__ __forceinline__ void mma_sync(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TEXT_OF(ELEMENT) "." TEXT_OF(ELEMENT) ".f32"
        " { %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

// The first numbers of two pairs of f16 as a pair of elements, and the second ones.
__device__ __forceinline__ void to_neighbours(f16, const u32 (&pairs)[2], u32& first, u32& second)
{
    first = permute_bytes(pairs[0], pairs[1], 0x5410);
    second = permute_bytes(pairs[0], pairs[1], 0x7632);
}
__device__ __forceinline__ void to_neighbours(bf16, const u32 (&pairs)[2], u32& first, u32& second)
{
    float x[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        x[i][0] = to_float(f16{(unsigned short)pairs[i]});
        x[i][1] = to_float(f16{(unsigned short)(pairs[i] >> 16)});
    }
    first = permute_bytes(word_of(x[0][0]), word_of(x[1][0]), 0x7632);
    second = permute_bytes(word_of(x[0][1]), word_of(x[1][1]), 0x7632);
}

// s = q k^T. q: fragments of 16 columns, of which lane t of four has columns 4 t to 4 t + 3 in the place of 2 t,
// 2 t + 1, 2 t + 8 and 2 t + 9, as it has them of a row of K; rows: where those of the warp begin, panels lie
// `pitch` bytes apart.
template <class Stored, int STEPS>
__device__ __forceinline__ void multiply_keys(float (&s)[4][4], const u32 (&q)[STEPS][4], u32 rows, int pitch)
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        if constexpr (sizeof(Stored) == 1) {
            u32 x[4];  // four numbers of key 8 j + g
            ldmatrix_x4(x, rows + i / 8 * pitch + lane * 128 + (i % 8 ^ lane % 8) * 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 pairs[2];
                to_halves(Stored{}, x[j], pairs);
                mma_sync(s[j], q[i], to_elements(element{}, pairs[0]), to_elements(element{}, pairs[1]));
            }
        } else {
            const u32 row = rows + i / 4 * pitch + g * 128 + ((i % 4 * 2 + t / 2) ^ g) * 16 + t % 2 * 8;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u64 x = load_shared<u64>(row + j * 8 * 128);
                mma_sync(s[j], q[i], (u32)x, (u32)(x >> 32));
            }
        }
    }
}

// acc += p v. Of V of 8 bits, fragments 2 i and 2 i + 1 of acc have the even and the odd ones of 16 columns.
template <class Stored, int FRAGMENTS>
__device__ __forceinline__ void multiply_values(float (&acc)[FRAGMENTS][4], const u32 (&p)[2][4], u32 rows, int pitch)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < FRAGMENTS / 2; ++i) {
        u32 x[4];
        if constexpr (sizeof(Stored) == 1) {
            u32 even[4], odd[4];  // of keys 8 j + 2 t and the next
            ldmatrix_x4_trans(x, rows + i / 8 * pitch + lane * 128 + (i % 8 ^ lane % 8) * 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 pairs[2];
                to_halves(Stored{}, x[j], pairs);
                to_neighbours(element{}, pairs, even[j], odd[j]);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                mma_sync(acc[2 * i], p[n], even[2 * n], even[2 * n + 1]);
                mma_sync(acc[2 * i + 1], p[n], odd[2 * n], odd[2 * n + 1]);
            }
        } else {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int row = 16 * n + lane % 16;
                ldmatrix_x4_trans(x, rows + i / 4 * pitch + row * 128 + ((i % 4 * 2 + lane / 16) ^ row % 8) * 16);
                mma_sync(acc[2 * i], p[n], x[0], x[1]);
                mma_sync(acc[2 * i + 1], p[n], x[2], x[3]);
            }
        }
    }
}

// Makes rows of the warp zeros, those that are not kept. kept: whether row `lane` is.
template <int PANELS>
__device__ __forceinline__ void clear_rows(u32 rows, int pitch, bool kept)
{
    if (!kept)
#pragma unroll 1
        for (int i = 0; i < PANELS * 8; ++i)
            store_shared(rows + i / 8 * pitch + threadIdx.x % 32 * 128 + i % 8 * 16, Chunk{});
    proxy_fence();  // before TMA overwrites them
    __syncwarp();
}
