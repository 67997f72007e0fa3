// A CPU in place of a GPU: what a generated kernel needs of CUDA, so that the same text compiles with g++ and runs.
//
// Every thread of a block is a fiber. The lanes of a warp take turns at each warp-wide instruction (shuffle, ldmatrix, mma);
// warps run one at a time, in random order, each as far as the next block-wide barrier. So a missing barrier shows: one warp
// reads what another has not written yet, and shared memory starts as NaN. A copy is made at a random moment between its start
// and the wait for it, so that a missing wait shows too; what another thread has copied is read after both have met since it
// waited, or that is a fault. Blocks run one at a time, in an order that changes from run to run.
#pragma once

#include "simt_calls.h"
#include "simt_numbers.h"

extern SIMT element shared[simt::SHARED / sizeof(element)];

#define __syncthreads() simt::meet(simt::At::barrier, __LINE__)
#define __syncwarp() simt::meet_warp(__LINE__)

static inline u32 shuffle_xor_u32(u32 x, int mask) { return simt::shuffle_xor(x, mask, __LINE__); }
static inline float shuffle_xor(float x, int mask)
{
    return __builtin_bit_cast(float, simt::shuffle_xor(__builtin_bit_cast(u32, x), mask, __LINE__));
}
static inline int shuffle(int x, int lane) { return int(simt::shuffle(u32(x), lane, __LINE__)); }
static inline bool any_lane(bool x) { return simt::any_lane(x, __LINE__); }
static inline bool any_thread(bool x)
{
    const bool any = simt::any_thread(x, __LINE__);
    __syncthreads();  // all have read what each said
    return any;
}

static inline void atomic_add(float* to, float x) { *to += x; }
static inline int atomicAdd(int* place, int x) { return (*place += x) - x; }
static inline int atomicOr(int* place, int x)
{
    const int before = *place;
    *place |= x;
    return before;
}
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((u32)x); }

static inline void copy_async(void* to, const void* from, bool inside) { simt::copy_async(to, from, inside, __LINE__); }
static inline void commit_copies() { simt::commit_copies(); }
template <int GROUPS> static void wait_copies() { simt::wait_copies(GROUPS); }

static inline u32 address(const void* place) { return u32((const unsigned char*)place - (const unsigned char*)shared); }
static inline u32 load_word(u32 place) { return simt::load_word(place, __LINE__); }
static inline void ldmatrix_x4(u32 (&x)[4], u32 row) { simt::load_matrices(x, row, false, __LINE__); }
static inline void ldmatrix_x4_trans(u32 (&x)[4], u32 row) { simt::load_matrices(x, row, true, __LINE__); }

static inline void mma_sync(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    using simt::Type;
    constexpr Type TYPE = sizeof(element) == 4 ? Type::tf32 : simt::is_f16<element> ? Type::f16 : Type::bf16;
    simt::multiply(TYPE, c, a, b0, b1, __LINE__);
}
