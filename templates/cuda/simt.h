// A CPU in place of a GPU: what a generated kernel needs of CUDA, so that the same text compiles with g++ and runs.
//
// Every thread of a block is a fiber. The lanes of a warp take turns at each warp-wide instruction (shuffle, ldmatrix, mma);
// warps run one at a time, in random order, each as far as the next block-wide barrier. So a missing barrier shows: one warp
// reads what another has not written yet, and shared memory starts as NaN. A copy is made at a random moment between its start
// and the wait for it, so that a missing wait shows too. Blocks run one at a time, in an order that changes from run to run.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <ucontext.h>

#define __global__ __attribute__((visibility("default")))
#define __device__ inline
#define __forceinline__
#define __shared__
#define __align__(n)
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)

struct Dim { unsigned x, y, z; };
static Dim threadIdx, blockIdx, gridDim;

alignas(1024) element shared[(1 << 18) / sizeof(element)];

namespace simt {

constexpr int WARP = 32, MOST = 1024, STACK = 128 * 1024, PENDING = 1024;
enum class At { instruction, barrier, end };

struct Copy { void* to; const void* from; bool inside; };

struct Fiber {
    ucontext_t start;
    jmp_buf resume;
    bool started;
    At at;
    int place;
    Copy copies[PENDING];  // not yet made, oldest first
    int first, last, groups[64], group_count;
};

static Fiber* fibers;
static char* stacks;
static void (*body)();
static jmp_buf scheduler;
static int current;
static unsigned threads_of_block;
static uint64_t random_state;
static jmp_buf escape;
static char message[256];

static uint32_t random_word()
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return uint32_t(random_state >> 16);
}

[[noreturn]] static void fail(const char* what, int line)
{
    snprintf(message, sizeof message, "block %u, thread %d, line %d: %s", blockIdx.x, current, line, what);
    _longjmp(escape, 1);
}

void next_lane();

static void run()
{
    body();
    Fiber& me = fibers[current];
    if (me.first != me.last)
        fail("a copy is left without a wait", 0);
    me.at = At::end;
    me.place = 0;
    next_lane();
    abort();
}

static void enter(int thread)
{
    current = thread;
    threadIdx.x = thread;
    Fiber& fiber = fibers[thread];
    if (fiber.started)
        _longjmp(fiber.resume, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

// The lane stops; the next one of its warp goes on, or, after the last, the scheduler if they wait for other warps.
void next_lane()
{
    Fiber& me = fibers[current];
    const int first = current / WARP * WARP, lane = current % WARP;
    if (lane > 0 && (me.at != fibers[first].at || me.place != fibers[first].place))
        fail("lanes of a warp are at different instructions", me.place);
    if (me.at != At::end && _setjmp(me.resume))
        return;
    if (lane == WARP - 1 && me.at != At::instruction)
        _longjmp(scheduler, 1);
    enter(lane == WARP - 1 ? first : current + 1);
}

static void meet(At at, int place)
{
    fibers[current].at = at;
    fibers[current].place = place;
    next_lane();
}

// What the lanes of a warp show each other at an instruction; two copies, so that a fast lane's next does not hide this one.
union Show {
    const unsigned char* row;
    struct { float a[8], b[4]; } product;
    float value;
    u32 word;
    bool flag;
};
static Show shown[2][MOST];
static int turn[MOST];

template <class F>
static const Show* exchange(int place, F fill)
{
    const int side = turn[current]++ & 1;
    fill(shown[side][current]);
    meet(At::instruction, place);
    return shown[side] + current / WARP * WARP;
}

static void make(const Copy& copy)
{
    if (copy.inside)
        memcpy(copy.to, copy.from, 16);
    else
        memset(copy.to, 0, 16);
}

static void make_until(Fiber& fiber, int end)
{
    for (; fiber.first < end; ++fiber.first)
        make(fiber.copies[fiber.first % PENDING]);
}

// Once for all blocks of a launch: `run` never returns, so what it starts from stays as it is.
static void make_contexts(int threads)
{
    for (int i = 0; i < threads; ++i) {
        ucontext_t& start = fibers[i].start;
        getcontext(&start);
        start.uc_stack.ss_sp = stacks + size_t(i) * STACK;
        start.uc_stack.ss_size = STACK;
        start.uc_link = nullptr;
        makecontext(&start, run, 0);
    }
}

// Runs a block: warps in random order, each to the next barrier, until all have ended.
static void run_block(int threads, uint64_t seed)
{
    threads_of_block = threads;
    random_state = seed * 0x9E3779B97F4A7C15ull + blockIdx.x * 0xBF58476D1CE4E5B9ull + 1;
    memset((void*)shared, 0xff, sizeof shared);
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.started = false;
        fiber.first = fiber.last = fiber.group_count = 0;
        turn[i] = 0;
        fiber.at = At::barrier;
        fiber.place = 0;
    }
    static int order[MOST / WARP];
    static int count, position;
    for (;;) {
        count = 0;
        for (int warp = 0; warp < threads / WARP; ++warp)
            if (fibers[warp * WARP].at != At::end)
                order[count++] = warp;
        if (count == 0)
            return;
        if (count < threads / WARP) {
            current = order[0] * WARP;
            fail("a barrier that other warps never reach", fibers[current].place);
        }
        for (int i = 1; i < count; ++i)
            if (fibers[order[i] * WARP].place != fibers[order[0] * WARP].place) {
                current = order[i] * WARP;
                fail("warps wait at different barriers", fibers[current].place);
            }
        for (int i = count - 1; i > 0; --i) {
            const int j = random_word() % (i + 1), other = order[i];
            order[i] = order[j];
            order[j] = other;
        }
        for (position = 0; position < count; ++position)
            if (!_setjmp(scheduler))
                enter(order[position] * WARP);
    }
}

// An access to memory that the process has not is a fault of the kernel's. The signal may come again: nothing returns from here.
static void stray(int) { fail("an access outside of all memory", 0); }
static void divided(int) { fail("a division by zero", 0); }

// Returns what went wrong, or null. memory: for the fibers and their stacks.
static const char* launch(void (*kernel)(), int blocks, int threads, int shared_bytes, uint64_t seed, char* memory, int = 1)
{
    fibers = (Fiber*)memory;
    stacks = memory + sizeof(Fiber) * MOST;
    body = kernel;
    gridDim = {unsigned(blocks), 1, 1};
    const char* problem = nullptr;
    struct sigaction faults = {}, before[3];
    faults.sa_handler = stray;
    faults.sa_flags = SA_NODEFER;
    sigaction(SIGSEGV, &faults, &before[0]);
    sigaction(SIGBUS, &faults, &before[1]);
    faults.sa_handler = divided;
    sigaction(SIGFPE, &faults, &before[2]);
    make_contexts(threads);
    if (_setjmp(escape))
        problem = message;
    else
        for (int i = 0; i < blocks; ++i) {  // from anywhere, up or down: no order is promised
            const int from = int(seed * 0x9E3779B97F4A7C15ull >> 33) % blocks, block = (from + i) % blocks;
            blockIdx = {unsigned(seed % 2 ? block : blocks - 1 - block), 0, 0};
            run_block(threads, seed);
            const unsigned char* end = (unsigned char*)shared + shared_bytes;
            if (*end != 0xff || memcmp(end, end + 1, sizeof shared - shared_bytes - 1) != 0)
                fail("a write past the end of shared memory", 0);
        }
    sigaction(SIGSEGV, &before[0], nullptr);
    sigaction(SIGBUS, &before[1], nullptr);
    sigaction(SIGFPE, &before[2], nullptr);
    return problem;
}

}  // namespace simt

#define __syncthreads() simt::meet(simt::At::barrier, __LINE__)
#define __syncwarp() simt::meet(simt::At::instruction, __LINE__)

#include "simt_numbers.h"
#include "simt_mma.h"

static inline float shuffle_xor(float x, int mask)
{
    const simt::Show* all = simt::exchange(__LINE__, [&](simt::Show& s) { s.value = x; });
    return all[(simt::current % simt::WARP) ^ mask].value;
}

static inline u32 shuffle_xor_u32(u32 x, int mask)
{
    const simt::Show* all = simt::exchange(__LINE__, [&](simt::Show& s) { s.word = x; });
    return all[(simt::current % simt::WARP) ^ mask].word;
}

static inline void atomic_add(float* to, float x) { *to += x; }

static inline int shuffle(int x, int lane)
{
    const simt::Show* all = simt::exchange(__LINE__, [&](simt::Show& s) { s.word = x; });
    return int(all[lane].word);
}

static inline bool any_lane(bool x)
{
    const simt::Show* all = simt::exchange(__LINE__, [&](simt::Show& s) { s.flag = x; });
    bool any = false;
    for (int lane = 0; lane < simt::WARP; ++lane)
        any |= all[lane].flag;
    return any;
}

static inline bool any_thread(bool x)
{
    static bool flags[simt::MOST];
    flags[simt::current] = x;
    simt::meet(simt::At::barrier, __LINE__);
    bool any = false;
    for (unsigned i = 0; i < simt::threads_of_block; ++i)
        any |= flags[i];
    simt::meet(simt::At::barrier, __LINE__);
    return any;
}

static inline int atomicAdd(int* place, int x) { return (*place += x) - x; }

static inline void copy_async(void* to, const void* from, bool inside)
{
    using namespace simt;
    if ((uintptr_t)to % 16 || (inside && (uintptr_t)from % 16))
        fail("a copy that is not aligned", __LINE__);
    const Copy copy = {to, from, inside};
    Fiber& me = fibers[current];
    if (random_word() % 2)
        make(copy);
    else
        me.copies[me.last++ % PENDING] = copy;
    if (me.last - me.first > PENDING)
        fail("too many copies under way", __LINE__);
}

static inline void commit_copies()
{
    simt::Fiber& me = simt::fibers[simt::current];
    me.groups[me.group_count++ % 64] = me.last;
}

template <int GROUPS>
static void wait_copies()
{
    simt::Fiber& me = simt::fibers[simt::current];
    if (me.group_count > GROUPS)
        simt::make_until(me, me.groups[(me.group_count - 1 - GROUPS) % 64]);
}
