// Device functions of all kernels for sm_90a: mbarriers, copies by TMA, mma by wgmma, warpgroups.
//
// A kernel whose lanes search for bounds together defines LANES_SEARCH: how many lanes search for the same bound.
#include "device.cuh"
#include "sm90_wgmma.cuh"

#ifndef ATTNC_SHIM

// ---- mbarriers: a phase ends when all expected threads have arrived, and all announced bytes

__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to other threads and to TMA.
__device__ __forceinline__ void mbarrier_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// A predicate: a branch would end the block of instructions that ptxas interleaves.
__device__ __forceinline__ void mbarrier_arrive_if(u32 barrier, bool arrives)
{
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0;\n"
                 "@p mbarrier.arrive.shared::cta.b64 _, [%0]; }" :: "r"(barrier), "r"((int)arrives) : "memory");
}

// Arrives, and announces bytes.
__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has ended; the phase before the first has parity 1.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity)
{
    asm volatile("{ .reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra.uni done;\n"
                 "bra.uni again;\n"
                 "done: }" :: "r"(barrier), "r"(parity) : "memory");
}

// ---- TMA: boxes of 64 columns between global and shared memory, where the 128-byte swizzle permutes their 16-byte
// chunks

__device__ __forceinline__ void tma_prefetch(const TensorMap& map)
{
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// Zeros outside of the tensor. All bytes of the box count on the barrier.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 barrier, int column, int row, int head,
    int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, { %3, %4, %5, %6 }], [%2];"
                 :: "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap& map, u32 from, int column, int row, int head, int batch)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, { %2, %3, %4, %5 }], [%1];"
                 :: "l"(&map), "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}

__device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until this thread's stores have read shared memory, or are done.
__device__ __forceinline__ void tma_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void tma_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8. x of a matrix: row lane / 4, columns 2
// (lane % 4) and + 1.
__device__ __forceinline__ void stmatrix_x4(u32 row, u32 x0, u32 x1, u32 x2, u32 x3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };"
                 :: "r"(row), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// Four 8 x 8 matrices, as stmatrix_x4 stores them.
__device__ __forceinline__ void ldmatrix_x4(u32 (&x)[4], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}

// Stores 16 bytes to global memory. Volatile, since ptxas would otherwise compute all addresses first.
__device__ __forceinline__ void store_chunk(void* to, u32 x0, u32 x1, u32 x2, u32 x3)
{
    asm volatile("st.global.v4.b32 [%0], { %1, %2, %3, %4 };"
                 :: "l"(to), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// Makes what this thread has written to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- wgmma: 64 rows of a warpgroup. Of accumulator fragment j, 8 columns, warp w has rows 16 w + lane / 4 (elements
// 0, 1) and + 8 (2, 3), columns 8 j + 2 (lane % 4) and + 1.

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most GROUPS of the newest groups are in flight.
template <int GROUPS>
__device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(GROUPS) : "memory");
}

// Descriptor of a tile with the 128-byte swizzle; leading, pitch: bytes, the "leading dimension" and "stride dimension"
// offsets of the PTX ISA.
__device__ __forceinline__ u64 wgmma_descriptor(u32 place, u32 leading, u32 pitch)
{
    return (u64)((place & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(pitch >> 4) << 32 | 1ull << 62;
}

// Descriptor of a tile without swizzle, 16 bytes a row; leading: bytes to the next 8 columns, pitch: to the next 8
// rows.
__device__ __forceinline__ u64 plain_descriptor(u32 place, u32 leading, u32 pitch)
{
    return (u64)((place & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(pitch >> 4) << 32;
}

// Two floats rounded to bf16, whatever the type of q is.
__device__ __forceinline__ u32 pack_bf16(float low, float high)
{
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// ---- copies of plain runs of bytes, multiples of 16

__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, u32 from, u32 bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(from), "r"(bytes) : "memory");
}

// Adds floats of shared memory to global memory, in no fixed order.
__device__ __forceinline__ void bulk_add(float* to, u32 from, u32 bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :: "l"(to), "r"(from), "r"(bytes) : "memory");
}

// Adds four floats in a row.
__device__ __forceinline__ void atomic_add4(float* to, const float* x)
{
    asm volatile("red.global.add.v4.f32 [%0], { %1, %2, %3, %4 };"
                 :: "l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Waits for a turn: earlier additions are visible then. For one lane.
__device__ __forceinline__ void await_turn(const int* turn, int mine)
{
    int now;
    do
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    while (now != mine);
}

// Passes the turn on, after making the additions that this thread knows of visible to all.
__device__ __forceinline__ void pass_turn(int* turn, int mine)
{
    asm volatile("st.release.gpu.global.b32 [%0], %1;" :: "l"(turn), "r"(mine + 1) : "memory");
}

// Orders copies and other memory accesses of this thread.
__device__ __forceinline__ void proxy_fence_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(u32 row, u32 x0, u32 x1, u32 x2, u32 x3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };"
                 :: "r"(row), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// Keeps uses of an operand of wgmma after the wait: the compiler does not know that a wait changes registers.
template <int N>
__device__ __forceinline__ void warpgroup_fence_operand(float (&x)[N][4])
{
#pragma unroll
    for (int j = 0; j < N; ++j)
        asm volatile("" : "+f"(x[j][0]), "+f"(x[j][1]), "+f"(x[j][2]), "+f"(x[j][3]) :: "memory");
}

template <int N>
__device__ __forceinline__ void warpgroup_fence_operand(u32 (&x)[N][4])
{
#pragma unroll
    for (int j = 0; j < N; ++j)
        asm volatile("" : "+r"(x[j][0]), "+r"(x[j][1]), "+r"(x[j][2]), "+r"(x[j][3]) :: "memory");
}

// ---- warpgroups

// Registers of a thread from here on: producers give up registers that consumers take.
template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_dealloc()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_alloc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}

// An address in shared memory.
template <class Value>
__device__ __forceinline__ void store_shared(u32 place, const Value& x)
{
    *(Value*)__cvta_shared_to_generic(place) = x;
}

template <class Value>
__device__ __forceinline__ Value load_shared(u32 place) { return *(const Value*)__cvta_shared_to_generic(place); }

// Named barrier of this many threads, whole warps.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// ---- programmatic dependent launch: blocks of the next kernel may start, and wait until this one has written
// everything

__device__ __forceinline__ void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A value that is the same in all lanes, known to be so by the compiler.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ __forceinline__ u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// Four of the 8 bytes of y and x, by the hexadecimal digits of `selector`, lowest first; + 8 fills a byte with that
// one's sign.
__device__ __forceinline__ u32 permute_bytes(u32 x, u32 y, u32 selector)
{
    u32 z;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(selector));
    return z;
}

// Lanes where x holds, by bits, and their number.
__device__ __forceinline__ u32 ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
__device__ __forceinline__ int count_bits(u32 x) { return __popc(x); }
__device__ __forceinline__ int count_lanes(bool x) { return count_bits(ballot(x)); }

__device__ __forceinline__ int warp_min(int x) { return __reduce_min_sync(0xffffffffu, x); }
__device__ __forceinline__ int warp_max(int x) { return __reduce_max_sync(0xffffffffu, x); }

#endif

__device__ __forceinline__ u32 word_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u32 word_of(int x) { return (u32)x; }

// Three bf16 with sum x, eight of its 24 bits each. If x is not finite, it is the first one.
__device__ __forceinline__ void split_bf16(float* terms, float x)
{
    const bool finite = fabsf(x) < INF;
    const float high = __uint_as_float(__float_as_uint(x) & 0xffff0000u), rest = finite ? x - high : 0.0f;
    const float middle = __uint_as_float(__float_as_uint(rest) & 0xffff0000u);
    terms[0] = finite ? high : x;
    terms[1] = middle;
    terms[2] = rest - middle;
}

struct TrueType { static constexpr bool value = true; };
struct FalseType { static constexpr bool value = false; };

// One of two neighbours of 4 bytes.
template <class Value>
__device__ __forceinline__ Value of_pair(u64 pair, int c) { return __builtin_bit_cast(Value, (u32)(pair >> 32 * c)); }

// One of two neighbours of 16 bits.
template <class Value>
__device__ __forceinline__ float half_of(u32 pair, int c) { return to_float(Value{(unsigned short)(pair >> 16 * c)}); }

// Keys of a thread before `end`: 2 bits for each j, of the keys first + 8 j and first + 8 j + 1.
__device__ __forceinline__ u32 columns_before(int end, int first)
{
    const int columns = max(end, first) - first, count = columns / 8 * 2 + min(columns % 8, 2);
    return count < 32 ? (1u << count) - 1 : ~0u;
}

// Where a role is in a pipeline of COUNT buffers: the next buffer, and the parity of the phase to wait for at its
// barrier.
template <int COUNT>
struct PipelineState {
    int index;
    u32 phase;
    __device__ __forceinline__ PipelineState next() const
    {
        return index + 1 == COUNT ? PipelineState{0, phase ^ 1} : PipelineState{index + 1, phase};
    }
    __device__ __forceinline__ void advance() { *this = next(); }
};

#ifdef LANES_SEARCH
// The number of elements of a sorted row for which `before` holds, which come first. LANES_SEARCH lanes search for the
// same bound, each tests one place, so a step divides the range by LANES_SEARCH + 1. All lanes of the warp take part.
template <class Before>
__device__ __forceinline__ int count_before(int length, Before before)
{
    const int lane = threadIdx.x % 32, first = min(lane / LANES_SEARCH, 32 / LANES_SEARCH - 1) * LANES_SEARCH;
    int lo = 0, hi = length;
    while (any_lane(lo < hi)) {
        const int step = (hi - lo) / (LANES_SEARCH + 1) + 1;
        const int place = lo + ((lane - first) % LANES_SEARCH + 1) * step - 1;
        const u32 found = ballot(place < hi && before(place)) >> first;
        lo += count_bits(LANES_SEARCH < 32 ? found & ((1u << LANES_SEARCH % 32) - 1) : found) * step;
        hi = min(hi, lo + step - 1);
    }
    return lo;
}

// First position in the sorted row whose element is >= value; `length` when there is none.
template <class Value>
__device__ int lower_bound(const Value* row, long long stride, int length, long long value)
{
    return count_before(length, [&](int place) { return row[place * stride] < value; });
}

template <class Value>
__device__ int lower_bound_real(const Value* row, long long stride, int length, float value)
{
    return count_before(length, [&](int place) { return row[place * stride] < value; });
}

// First position in the sorted row whose element is > value; `length` when there is none.
template <class Value>
__device__ int upper_bound(const Value* row, long long stride, int length, long long value)
{
    return count_before(length, [&](int place) { return row[place * stride] <= value; });
}

template <class Value>
__device__ int upper_bound_real(const Value* row, long long stride, int length, float value)
{
    return count_before(length, [&](int place) { return row[place * stride] <= value; });
}
#endif

// Makes the compiler compute x here, and not where it is read.
__device__ __forceinline__ void settle(u32& x) { asm volatile("" : "+r"(x)); }

#include "sm90_fragments.cuh"
