// What kernels for sm_90a have in common: mbarriers, copies by TMA, products of matrices by wgmma, and warpgroups.
//
// A kernel whose warps look for bounds with all lanes together also defines LANES_SEARCH: how many look for the same.
#include "device.cuh"

#ifndef ATTNC_SHIM

// ---- mbarriers: a phase ends when all threads that count have arrived and all bytes that were announced have

__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Other threads and the copy engine see the barriers.
__device__ __forceinline__ void mbarrier_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Not a branch, which would end the block of instructions that ptxas interleaves.
__device__ __forceinline__ void mbarrier_arrive_if(u32 barrier, bool arrives)
{
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0;\n"
                 "@p mbarrier.arrive.shared::cta.b64 _, [%0]; }" :: "r"(barrier), "r"((int)arrives) : "memory");
}

// Arrives, and announces so many bytes.
__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity has ended; the one before the first has parity 1.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity)
{
    asm volatile("{ .reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra.uni done;\n"
                 "bra.uni again;\n"
                 "done: }" :: "r"(barrier), "r"(parity) : "memory");
}

// ---- TMA: boxes of 64 columns between global and shared memory, where the 128-byte swizzle permutes their 16-byte chunks

__device__ __forceinline__ void tma_prefetch(const TensorMap& map)
{
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// Zeros outside of the tensor; all bytes of the box count on the barrier.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 barrier, int column, int row, int head, int batch)
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

// Until this thread's stores have read shared memory, and until they are done.
__device__ __forceinline__ void tma_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void tma_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Four 8 x 8 pieces; lane i gives the place of row i % 8 of piece i / 8. x of piece p: row lane / 4, columns 2 (lane % 4) and the next.
__device__ __forceinline__ void store_pieces(u32 row, u32 x0, u32 x1, u32 x2, u32 x3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };"
                 :: "r"(row), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// The other way.
__device__ __forceinline__ void load_pieces(u32 (&x)[4], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}

// 16 bytes to global memory, in the order of the text: ptxas would rather keep all addresses at once.
__device__ __forceinline__ void store_chunk(void* to, u32 x0, u32 x1, u32 x2, u32 x3)
{
    asm volatile("st.global.v4.b32 [%0], { %1, %2, %3, %4 };" :: "l"(to), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// What this thread has written to shared memory, the copy engine and the tensor cores see.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- wgmma: a warpgroup multiplies 64 rows. Warp w has rows 16 w + lane / 4 (elements 0, 1 of a piece) and that + 8 (2, 3), columns
// 8 j + 2 (lane % 4) and the next of piece j.

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most GROUPS of the newest groups are under way.
template <int GROUPS>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(GROUPS) : "memory"); }

// Four registers of a result `d`, as operands of an instruction.
#define WGMMA_PIECE(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])

// Of a tile in shared memory with the 128-byte swizzle; leading, pitch: bytes between its pieces.
__device__ __forceinline__ u64 wgmma_descriptor(u32 place, u32 leading, u32 pitch)
{
    return (u64)((place & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(pitch >> 4) << 32 | 1ull << 62;
}

// Of a tile without a swizzle, 16 bytes a row; leading: bytes to the next 8 columns, pitch: to the next 8 rows.
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
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(to), "r"(from), "r"(bytes) : "memory");
}

// Adds what lies in shared memory to floats in global memory, in whatever order such additions arrive.
__device__ __forceinline__ void bulk_add(float* to, u32 from, u32 bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" :: "l"(to), "r"(from), "r"(bytes) : "memory");
}

// Adds four floats in a row.
__device__ __forceinline__ void atomic_add4(float* to, const float* x)
{
    asm volatile("red.global.add.v4.f32 [%0], { %1, %2, %3, %4 };" :: "l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Until it is this turn: what was added before is there. One lane waits.
__device__ __forceinline__ void await_turn(const int* turn, int mine)
{
    int now;
    do
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    while (now != mine);
}

// The next turn, once what this thread knows to have been added is there for everybody.
__device__ __forceinline__ void pass_turn(int* turn, int mine)
{
    asm volatile("st.release.gpu.global.b32 [%0], %1;" :: "l"(turn), "r"(mine + 1) : "memory");
}

// Between copies and other accesses of memory of this thread.
__device__ __forceinline__ void copies_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// As store_pieces, each piece transposed.
__device__ __forceinline__ void store_pieces_transposed(u32 row, u32 x0, u32 x1, u32 x2, u32 x3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };"
                 :: "r"(row), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

// The values are there, and nothing that reads them stands above: for the compiler, which does not know what a wait means.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N][4])
{
#pragma unroll
    for (int j = 0; j < N; ++j)
        asm volatile("" : "+f"(x[j][0]), "+f"(x[j][1]), "+f"(x[j][2]), "+f"(x[j][3]) :: "memory");
}

template <int N>
__device__ __forceinline__ void pin(u32 (&x)[N][4])
{
#pragma unroll
    for (int j = 0; j < N; ++j)
        asm volatile("" : "+r"(x[j][0]), "+r"(x[j][1]), "+r"(x[j][2]), "+r"(x[j][3]) :: "memory");
}

// ---- warpgroups

// A thread's registers from now on: fewer of those that copy, so that those that multiply can have more.
template <int COUNT>
__device__ __forceinline__ void warpgroup_give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void warpgroup_take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT)); }

// To a place in shared memory.
template <class Value>
__device__ __forceinline__ void store_shared(u32 place, const Value& x)
{
    *(Value*)__cvta_shared_to_generic(place) = x;
}

template <class Value>
__device__ __forceinline__ Value load_shared(u32 place) { return *(const Value*)__cvta_shared_to_generic(place); }

// Of so many threads, whole warps.
__device__ __forceinline__ void warpgroups_meet(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// ---- launches: the kernel behind this one may have its blocks started, which wait until all that this one has written is there

__device__ __forceinline__ void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The same in all lanes, and the compiler knows.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ __forceinline__ u32 from_lane(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// Four of the 8 bytes of y and x, by hexadecimal digits of `selector` from the lowest; + 8: what fills a byte with that one's sign.
__device__ __forceinline__ u32 permute_bytes(u32 x, u32 y, u32 selector)
{
    u32 z;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(selector));
    return z;
}

// Which lanes say so, by bits, and how many.
__device__ __forceinline__ u32 which_lanes(bool x) { return __ballot_sync(0xffffffffu, x); }
__device__ __forceinline__ int count_bits(u32 x) { return __popc(x); }
__device__ __forceinline__ int count_lanes(bool x) { return count_bits(which_lanes(x)); }

__device__ __forceinline__ int least_of_lanes(int x) { return __reduce_min_sync(0xffffffffu, x); }
__device__ __forceinline__ int most_of_lanes(int x) { return __reduce_max_sync(0xffffffffu, x); }

#endif

__device__ __forceinline__ u32 word_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u32 word_of(int x) { return (u32)x; }

// Three bf16 whose sum is x: they have its 24 bits, eight each. What is not finite is the first one.
__device__ __forceinline__ void split_bf16(float* pieces, float x)
{
    const bool finite = fabsf(x) < INF;
    const float high = __uint_as_float(__float_as_uint(x) & 0xffff0000u), rest = finite ? x - high : 0.0f;
    const float middle = __uint_as_float(__float_as_uint(rest) & 0xffff0000u);
    pieces[0] = finite ? high : x;
    pieces[1] = middle;
    pieces[2] = rest - middle;
}

struct Yes { static constexpr bool value = true; };
struct No { static constexpr bool value = false; };

// One of two neighbours of 4 bytes.
template <class Value>
__device__ __forceinline__ Value of_pair(u64 pair, int c) { return __builtin_bit_cast(Value, (u32)(pair >> 32 * c)); }

// One of two neighbours of 16 bits.
template <class Value>
__device__ __forceinline__ float half_of(u32 pair, int c) { return to_float(Value{(unsigned short)(pair >> 16 * c)}); }

// Which of a thread's keys lie before `end`, of those 8 j and 8 j + 1 behind `first`: 2 bits for each j.
__device__ __forceinline__ u32 columns_before(int end, int first)
{
    const int columns = max(end, first) - first, count = columns / 8 * 2 + min(columns % 8, 2);
    return count < 32 ? (1u << count) - 1 : ~0u;
}

// A buffer of a ring of COUNT, and the parity of the phase that is waited for next at its barriers.
template <int COUNT>
struct Ring {
    int at;
    u32 parity;
    __device__ __forceinline__ Ring after() const { return at + 1 == COUNT ? Ring{0, parity ^ 1} : Ring{at + 1, parity}; }
    __device__ __forceinline__ void step() { *this = after(); }
};

#ifdef LANES_SEARCH
// How many elements of a sorted row come before the first of which that is not true. So many lanes look for the same, each at one place, so
// that a step of LANES_SEARCH leaves a LANES_SEARCH + 1st; all lanes of the warp take part.
template <class Before>
__device__ __forceinline__ int count_before(int length, Before before)
{
    const int lane = threadIdx.x % 32, first = min(lane / LANES_SEARCH, 32 / LANES_SEARCH - 1) * LANES_SEARCH;
    int lo = 0, hi = length;
    while (any_lane(lo < hi)) {
        const int step = (hi - lo) / (LANES_SEARCH + 1) + 1, place = lo + ((lane - first) % LANES_SEARCH + 1) * step - 1;
        const u32 found = which_lanes(place < hi && before(place)) >> first;
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

// Computed by now: the compiler would rather do so where it is read.
__device__ __forceinline__ void settle(u32& x) { asm volatile("" : "+r"(x)); }
