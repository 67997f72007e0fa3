// A CPU in place of a Hopper GPU: the instructions of sm_90a that a generated kernel uses by name (attnc/support/sm90.cuh), so that the
// same text compiles with g++ and runs.
//
// Warps go on independently, in an order that a seed shuffles. Copies and products are made at a random moment between their issue and
// what waits for them, and what is undefined until then is NaN. Beside that every 16 bytes of shared memory know their writer and
// readers, and every warp what it has waited for: an order that nothing enforces is a fault even when it does no harm. A deadlock is a
// fault that lists what each warp waits for.
//
// What is not seen: plain loads and stores of shared memory, other than by the functions below; they meet wrong values at most.
#pragma once

#include "simt_calls.h"
#include "../cuda/simt_numbers.h"

// Where a function is called: a fault tells.
struct SimtLine {
    int number;
    constexpr SimtLine(const SimtLine&) = default;
    static constexpr SimtLine here(int line = __builtin_LINE()) { return {line}; }
    constexpr operator int() const { return number; }

private:
    constexpr SimtLine(int line) : number(line) {}
};
#define SIMT_LINE SimtLine line = SimtLine::here()

// ---- warps and blocks

static inline void __syncthreads(SIMT_LINE) { simt::named_barrier(0, simt::threads_of_block, simt::Meeting::aligned, line); }
static inline void __syncwarp(SIMT_LINE) { simt::together(simt::SYNC, line); }
static inline void __threadfence() {}
static inline void __nanosleep(unsigned) { simt::give_turn(); }
static inline void named_barrier_sync(int barrier, int threads, SIMT_LINE) { simt::named_barrier(barrier, threads, simt::Meeting::aligned, line); }
static inline void named_barrier_meet(int barrier, int threads, SIMT_LINE) { simt::named_barrier(barrier, threads, simt::Meeting::anywhere, line); }
static inline void named_barrier_arrive(int barrier, int threads, SIMT_LINE) { simt::named_barrier(barrier, threads, simt::Meeting::arrival, line); }
template <int COUNT> static void warpgroup_reg_dealloc(SIMT_LINE) { simt::set_registers(COUNT, false, line); }
template <int COUNT> static void warpgroup_reg_alloc(SIMT_LINE) { simt::set_registers(COUNT, true, line); }
static inline void wait_for_launch() {}    // griddepcontrol: one kernel ends before the next begins
static inline void allow_next_launch() {}

template <class T>
static T shuffle(T x, int lane, SIMT_LINE)
{
    static_assert(sizeof(T) == 4, "a shuffle moves 4 bytes");
    return __builtin_bit_cast(T, simt::shuffle(__builtin_bit_cast(u32, x), lane, line));
}

template <class T> static T shuffle_xor(T x, int mask, SIMT_LINE) { return shuffle(x, (simt::current % simt::WARP) ^ mask, line); }
static inline u32 shuffle_xor_u32(u32 x, int mask, SIMT_LINE) { return shuffle_xor(x, mask, line); }
static inline int uniform(int x, SIMT_LINE) { return shuffle(x, 0, line); }

static inline int count_lanes(bool x, SIMT_LINE)
{
    int count = x;
    for (int mask = 1; mask < simt::WARP; mask *= 2)
        count += shuffle_xor(count, mask, line);
    return count;
}

static inline int warp_sum(int x, SIMT_LINE)
{
    for (int mask = 1; mask < simt::WARP; mask *= 2)
        x += shuffle_xor(x, mask, line);
    return x;
}

// As movmatrix.trans of a matrix of 8 x 8.
static inline u32 turned(u32 x, SIMT_LINE)
{
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    const u32 low = shuffle((int)x, 4 * column + row / 2, line), high = shuffle((int)x, 4 * (column + 1) + row / 2, line);
    return (low >> 16 * (row % 2) & 0xffff) | (high >> 16 * (row % 2)) << 16;
}

static inline int count_bits(u32 x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((u32)x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }

static inline u32 ballot(bool x, SIMT_LINE) { return simt::ballot(x, line); }
static inline int warp_min(int x, SIMT_LINE)
{
    for (int mask = 1; mask < simt::WARP; mask *= 2)
        x = min(x, shuffle_xor(x, mask, line));
    return x;
}

static inline int warp_max(int x, SIMT_LINE) { return ~warp_min(~x, line); }

static inline bool any_lane(bool x, SIMT_LINE) { return simt::ballot(x, line) != 0; }

static inline bool elect_one(SIMT_LINE)
{
    simt::together(simt::ELECT, line);
    return simt::current % simt::WARP == 0;
}

template <class T> static T atomicAdd(T* place, T x) { return (*place += x) - x; }
static inline int atomicExch(int* place, int x)
{
    const int before = *place;
    *place = x;
    return before;
}
static inline int atomicOr(int* place, int x)
{
    const int before = *place;
    *place |= x;
    return before;
}
static inline void atomic_add(float* place, float x) { *place += x; }
static inline void atomic_add4(float* place, const float* x) { for (int i = 0; i < 4; ++i) place[i] += x[i]; }
static inline void wait_global(const volatile int* place, int value, SIMT_LINE) { simt::wait_for_memory(place, value, line); }
static inline void await_turn(const int* turn, int mine, SIMT_LINE) { simt::wait_for_memory(turn, mine, line); }
static inline void pass_turn(int* turn, int mine) { *turn = mine + 1; }
static inline void proxy_fence_all() {}

static inline void store_chunk(void* to, u32 x0, u32 x1, u32 x2, u32 x3, SIMT_LINE)
{
    if ((uintptr_t)to % 16)
        simt::fail(line, "16 bytes are stored at an address that is not a multiple of 16");
    const u32 x[] = {x0, x1, x2, x3};
    memcpy(to, x, 16);
}

static inline u32 permute_bytes(u32 x, u32 y, u32 selector)
{
    const u64 bytes = u64(y) << 32 | x;
    u32 z = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 digit = selector >> 4 * i & 15, byte = bytes >> 8 * (digit & 7) & 0xff;
        z |= (digit & 8 ? (byte & 0x80 ? 0xffu : 0) : byte) << 8 * i;
    }
    return z;
}

static inline float log2_(float x) { return log2f(x); }
template <class T> static void warpgroup_fence_operand(T&) {}

// ---- shared memory

static inline u32 address(const void* place) { return u32((const unsigned char*)place - shared) + simt::BASE; }

template <class T>
static void store_shared(u32 place, const T& x, SIMT_LINE)
{
    memcpy(simt::at(place, sizeof x, sizeof x, line, "a store"), &x, sizeof x);
    simt::wrote(place, sizeof x, line);
}

template <class T>
static T load_shared(u32 place, SIMT_LINE)
{
    T x;
    memcpy(&x, simt::at(place, sizeof x, sizeof x, line, "a load"), sizeof x);
    simt::check_read(place, sizeof x, line);
    return x;
}

static inline void stmatrix_x4(u32 row, u32 x0, u32 x1, u32 x2, u32 x3, SIMT_LINE) { simt::store_matrices(row, {x0, x1, x2, x3}, false, line); }
static inline void stmatrix_x4_trans(u32 row, u32 x0, u32 x1, u32 x2, u32 x3, SIMT_LINE) { simt::store_matrices(row, {x0, x1, x2, x3}, true, line); }
static inline void ldmatrix_x4(u32 (&x)[4], u32 row, SIMT_LINE) { simt::load_matrices(x, row, false, line); }
static inline void ldmatrix_x4_trans(u32 (&x)[4], u32 row, SIMT_LINE) { simt::load_matrices(x, row, true, line); }
static inline void proxy_fence() { simt::fence_proxy(); }

// ---- mbarriers

static inline void mbarrier_init(u32 barrier, int arrivals, SIMT_LINE) { simt::barrier_init(barrier, u32(arrivals), line); }
static inline void mbarrier_fence() { simt::fence_proxy(); }
static inline void mbarrier_arrive(u32 barrier, SIMT_LINE) { simt::barrier_arrive(barrier, 0, line); }
static inline void mbarrier_expect(u32 barrier, u32 bytes, SIMT_LINE) { simt::barrier_arrive(barrier, bytes, line); }
static inline void mbarrier_wait(u32 barrier, u32 parity, SIMT_LINE) { simt::barrier_wait(barrier, parity, line); }
static inline void mbarrier_arrive_if(u32 barrier, bool arrives, SIMT_LINE)
{
    if (arrives)
        simt::barrier_arrive(barrier, 0, line);
}
static inline bool mbarrier_try(u32 barrier, u32 parity, SIMT_LINE)
{
    const bool passed = simt::barrier_passed(barrier, parity, line);
    if (!passed)
        simt::give_turn();
    return passed;
}

// ---- copies

static inline void tma_prefetch(const TensorMap&) {}
static inline void prefetch_line(const void*) {}
static inline void tma_load(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, SIMT_LINE)
{
    simt::tensor_copy(simt::Kind::load, to, &map, barrier, line, c0, c1);
}
static inline void tma_store(const TensorMap& map, u32 from, int c0, int c1, SIMT_LINE)
{
    simt::tensor_copy(simt::Kind::store, from, &map, 0, line, c0, c1);
}
static inline void tma_load(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2, SIMT_LINE)
{
    simt::tensor_copy(simt::Kind::load, to, &map, barrier, line, c0, c1, c2);
}
static inline void tma_store(const TensorMap& map, u32 from, int c0, int c1, int c2, SIMT_LINE)
{
    simt::tensor_copy(simt::Kind::store, from, &map, 0, line, c0, c1, c2);
}
static inline void tma_load(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3, SIMT_LINE)
{
    simt::tensor_copy(simt::Kind::load, to, &map, barrier, line, c0, c1, c2, c3);
}
static inline void tma_store(const TensorMap& map, u32 from, int c0, int c1, int c2, int c3, SIMT_LINE)
{
    simt::tensor_copy(simt::Kind::store, from, &map, 0, line, c0, c1, c2, c3);
}
static inline void tma_load(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3, int c4, SIMT_LINE)
{
    simt::tensor_copy(simt::Kind::load, to, &map, barrier, line, c0, c1, c2, c3, c4);
}
static inline void tma_store(const TensorMap& map, u32 from, int c0, int c1, int c2, int c3, int c4, SIMT_LINE)
{
    simt::tensor_copy(simt::Kind::store, from, &map, 0, line, c0, c1, c2, c3, c4);
}
static inline void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier, SIMT_LINE)
{
    simt::bulk_copy(simt::Kind::bulk_load, to, (void*)from, bytes, barrier, line);
}
static inline void bulk_store(void* to, u32 from, u32 bytes, SIMT_LINE)
{
    simt::bulk_copy(simt::Kind::bulk_store, from, to, bytes, 0, line);
}
static inline void bulk_add(float* to, u32 from, u32 bytes, SIMT_LINE)
{
    simt::bulk_copy(simt::Kind::bulk_add, from, to, bytes, 0, line);
}
static inline void tma_commit() { simt::commit_stores(); }
static inline void tma_wait_read(SIMT_LINE) { simt::wait_stores(0, true, line); }
static inline void tma_wait(SIMT_LINE) { simt::wait_stores(0, false, line); }

static inline void copy_async(u32 to, const void* from, bool inside, SIMT_LINE) { simt::copy_async(to, from, inside ? 16 : 0, 16, line); }
static inline void copy_async_halves(u32 to, const void* from, int bytes, SIMT_LINE) { simt::copy_async(to, from, bytes, 8, line); }
// attnc/support/sm90_gather.cuh
static inline u32 read_lane() { return threadIdx.x % 32; }
struct Chunk;
template <class T = Chunk>
static T load_whole(const unsigned char* from, bool exist, SIMT_LINE)
{
    if (exist && (uintptr_t)from % 16)
        simt::fail(line, "16 bytes are loaded from an address that is not a multiple of 16");
    return exist ? *(const T*)from : T{};
}
template <class T = Chunk>
static T load_halves(const unsigned char* from, int bytes, SIMT_LINE)
{
    if (bytes >= 8 && (uintptr_t)from % 8)
        simt::fail(line, "8 bytes are loaded from an address that is not a multiple of 8");
    T x = {};
    memcpy((void*)&x, from, bytes >= 16 ? 16 : bytes >= 8 ? 8 : 0);
    return x;
}
static inline void copies_wait(SIMT_LINE) { simt::wait_copies(line); }
static inline void copies_arrive(u32 barrier, SIMT_LINE) { simt::copies_arrive(barrier, line); }

// ---- clusters: attnc/support/sm90_cluster.cuh

static inline int block_rank() { return simt::block_rank(); }
static inline void cluster_sync(SIMT_LINE)
{
    simt::together(simt::SYNC, line);
    simt::cluster_barrier(line);
}
static inline void cluster_arrive_if(u32 barrier, bool arrives, SIMT_LINE)
{
    if (arrives)
        simt::cluster_arrive(barrier, line);
}
static inline void tma_load_multicast(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3, SIMT_LINE)
{
    const int coordinates[] = {c0, c1, c2, c3};
    simt::multicast(to, &map, barrier, line, coordinates, 4);
}
static inline void cluster_send(u32 place, u32 barrier, int rank, int word, SIMT_LINE) { simt::tell(place, barrier, rank, word, line); }
static inline void cluster_wait(u32 barrier, u32 parity, SIMT_LINE) { simt::barrier_wait(barrier, parity, line); }

// ---- wgmma

static inline u64 wgmma_descriptor(u32 place, u32 leading, u32 stride)
{
    return u64((place & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 62;
}
static inline u64 plain_descriptor(u32 place, u32 leading, u32 stride)
{
    return u64((place & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32;
}
static inline void wgmma_fence(SIMT_LINE) { simt::wgmma_fence(line); }
static inline void wgmma_commit(SIMT_LINE) { simt::wgmma_commit(line); }
template <int GROUPS> static void wgmma_wait(SIMT_LINE) { simt::wgmma_wait(GROUPS, line); }

// Both in shared memory; TA, TB: rows are the depth.
template <bool TA = false, bool TB = false, int N>
static void wgmma(float (&d)[N][4], u64 a, u64 b, bool accumulate, SIMT_LINE)
{
    simt::wgmma<8 * N, false, TA, TB, simt::is_f16<element>>(d[0], nullptr, a, b, accumulate, line);
}
template <bool TB = true, int N>
static void wgmma_bf16(float (&d)[N][4], const u32 (&a)[4], u64 b, bool accumulate, SIMT_LINE)
{
    simt::wgmma<8 * N, true, false, TB, false>(d[0], a, 0, b, accumulate, line);
}
// a in registers; the rows of b are the depth.
template <bool TB = true, int N>
static void wgmma(float (&d)[N][4], const u32 (&a)[4], u64 b, bool accumulate, SIMT_LINE)
{
    simt::wgmma<8 * N, true, false, TB, simt::is_f16<element>>(d[0], a, 0, b, accumulate, line);
}

// ---- mma.sync: 16 rows of a warp. Fragments are those of an accumulator of wgmma.

static inline void mma_sync(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, SIMT_LINE)
{
    simt::multiply_fragments(c, a, b0, b1, simt::is_f16<element>, line);
}
