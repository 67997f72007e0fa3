// All of a GPU that a kernel does not see: the text of a library.
#pragma once

#define SIMT_MACHINE
#include "simt_calls.h"

#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

SIMT alignas(1024) unsigned char shared[simt::SHARED];

namespace simt {

typedef uint32_t u32;
constexpr int WARP = 32, MOST = 1024, STACK = 128 * 1024, PENDING = 1024;

struct Copy { void* to; const void* from; bool inside, made; };

// Whose copy 16 bytes of shared memory are, and how often that thread had met its warp, and its block, when it had waited for it:
// what it has copied others may read once they have met it since.
struct Unit { unsigned copier; bool is_there; int meetings, barriers; };

struct Fiber {
    ucontext_t start;
    jmp_buf resume;
    bool started;
    At at;
    int place;
    Copy copies[PENDING];  // not yet waited for, oldest first
    int first, last, groups[64], group_count, meetings, barriers;
};

static Fiber* fibers;
static char* stacks;
static void (*body)();
static jmp_buf scheduler;
static int current;
static unsigned threads_of_block;
static uint64_t random_state;
static Unit units[SHARED / 16];
static jmp_buf escape;
static char message[256];

static uint32_t random_word()
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return uint32_t(random_state >> 16);
}

void fail(const char* what, int line)
{
    snprintf(message, sizeof message, "block %u, thread %d, line %d: %s", blockIdx.x, current, line, what);
    _longjmp(escape, 1);
}

// What g++ calls where an address is not aligned as its type is (-fsanitize=alignment): libubsan has the layout.
struct Mismatch { const char* file; uint32_t line, column; const void* type; unsigned char log2_of_alignment, kind; };
extern "C" SIMT void __ubsan_handle_type_mismatch_v1(const Mismatch* found, void*)
{
    if (found->log2_of_alignment <= 4)  // no instruction accesses more
        fail("an access at an address that is not aligned", int(found->line));
}

// ---- fibers

static void next_lane();

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
static void next_lane()
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

void meet(At at, int line)
{
    fibers[current].at = at;
    fibers[current].place = line;
    next_lane();
    if (at == At::barrier) {
        ++fibers[current].barriers;
        ++fibers[current].meetings;
    }
}

void meet_warp(int line)
{
    meet(At::instruction, line);
    ++fibers[current].meetings;
}

// ---- what lanes show each other

// What they show at an instruction; two copies, so that a fast lane's next does not hide this one.
union Show {
    const unsigned char* row;
    struct { float a[8], b[4]; } product;
    u32 word;
    bool flag;
};
static Show shown[2][MOST];
static int turn[MOST];

template <class F>
static const Show* exchange(int line, F fill)
{
    const int side = turn[current]++ & 1;
    fill(shown[side][current]);
    meet(At::instruction, line);
    return shown[side] + current / WARP * WARP;
}

u32 shuffle(u32 x, int lane, int line)
{
    return exchange(line, [&](Show& s) { s.word = x; })[lane].word;
}

u32 shuffle_xor(u32 x, int mask, int line) { return shuffle(x, current % WARP ^ mask, line); }

bool any_lane(bool x, int line)
{
    const Show* all = exchange(line, [&](Show& s) { s.flag = x; });
    bool any = false;
    for (int lane = 0; lane < WARP; ++lane)
        any |= all[lane].flag;
    return any;
}

bool any_thread(bool x, int line)
{
    static bool flags[MOST];
    flags[current] = x;
    meet(At::barrier, line);
    bool any = false;
    for (unsigned i = 0; i < threads_of_block; ++i)
        any |= flags[i];
    return any;
}

// ---- copies

static Unit& unit_at(const void* place) { return units[((const unsigned char*)place - shared) / 16]; }

// A load of 16 bytes, by this thread alone or by all of its warp.
static void check_copied(u32 place, bool by_warp, int line)
{
    const Unit& unit = units[place / 16];
    const Fiber& me = fibers[current];
    const int copier = int(unit.copier) - 1;
    if (copier < 0 || (copier == current && unit.is_there && !by_warp))
        return;
    if (!unit.is_there)
        fail("a load of what a copy brings before a wait for it", line);
    if (copier / WARP != current / WARP && unit.barriers >= me.barriers)
        fail("a load of what another warp has copied, without a barrier since it is there", line);
    if (copier / WARP == current / WARP && unit.meetings >= me.meetings)
        fail("a load of what another lane has copied, without a __syncwarp since it is there", line);
}

static void make(const Copy& copy)
{
    if (copy.inside)
        memcpy(copy.to, copy.from, 16);
    else
        memset(copy.to, 0, 16);
}

void copy_async(void* to, const void* from, bool inside, int line)
{
    if ((uintptr_t)to % 16 || (inside && (uintptr_t)from % 16))
        fail("a copy that is not aligned", line);
    const Copy copy = {to, from, inside, random_word() % 2 == 0};
    Fiber& me = fibers[current];
    if (copy.made)
        make(copy);
    me.copies[me.last++ % PENDING] = copy;
    unit_at(to) = {unsigned(current) + 1, false, 0, 0};
    if (me.last - me.first > PENDING)
        fail("too many copies under way", line);
}

void commit_copies()
{
    Fiber& me = fibers[current];
    me.groups[me.group_count++ % 64] = me.last;
}

void wait_copies(int groups)
{
    Fiber& me = fibers[current];
    if (me.group_count <= groups)
        return;
    for (const int end = me.groups[(me.group_count - 1 - groups) % 64]; me.first < end; ++me.first) {
        const Copy& copy = me.copies[me.first % PENDING];
        if (!copy.made)
            make(copy);
        if (Unit& unit = unit_at(copy.to); unit.copier == unsigned(current) + 1)
            unit = {unit.copier, true, me.meetings, me.barriers};
    }
}

// ---- fragments and their products

u32 load_word(u32 place, int line)
{
    u32 x;
    if (place + 4 > sizeof shared || place % 4)
        fail("a word outside of shared memory, or not aligned", line);
    check_copied(place, false, line);
    memcpy(&x, shared + place, 4);
    return x;
}

void load_matrices(u32 (&x)[4], u32 row, bool transposed, int line)
{
    if (row + 16 > sizeof shared || row % 16)
        fail("a matrix row outside of shared memory, or not aligned", line);
    check_copied(row, true, line);
    const Show* all = exchange(line, [&](Show& s) { s.row = shared + row; });
    const int g = current % WARP / 4, t = current % 4;
    for (int p = 0; p < 4; ++p)
        if (transposed) {
            uint16_t low, high;
            memcpy(&low, all[8 * p + 2 * t].row + 2 * g, 2);
            memcpy(&high, all[8 * p + 2 * t + 1].row + 2 * g, 2);
            x[p] = low | u32(high) << 16;
        } else
            memcpy(&x[p], all[8 * p + g].row + 4 * t, 4);
}

// `half`: of a register with two numbers.
template <Type TYPE>
static float number(u32 x, int half)
{
    if (TYPE == Type::tf32)
        return __builtin_bit_cast(float, x & 0xffffe000);  // what the last 13 bits are does not count
    const u32 bits = x >> 16 * half & 0xffff;
    return TYPE == Type::f16 ? float(__builtin_bit_cast(_Float16, uint16_t(bits))) : __builtin_bit_cast(float, bits << 16);
}

template <Type TYPE>
static void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int line)
{
    constexpr int PARTS = TYPE == Type::tf32 ? 1 : 2;  // of a register
    const Show* all = exchange(line, [&](Show& s) {
        for (int i = 0; i < 6; ++i) {
            float* const to = i < 4 ? s.product.a + i * PARTS : s.product.b + (i - 4) * PARTS;
            for (int half = 0; half < PARTS; ++half)
                to[half] = number<TYPE>(i < 4 ? a[i] : i == 4 ? b0 : b1, half);
        }
    });
    const int g = current % WARP / 4, t = current % 4;
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 8 * PARTS; ++k) {  // registers a0, a1 and b0 hold the first half of the depth
            const int lane = k % (4 * PARTS) / PARTS, half = k / (4 * PARTS) * PARTS, i = k % PARTS;
            const float left = all[4 * g + lane].product.a[2 * half + e / 2 * PARTS + i];
            const float right = all[4 * (2 * t + e % 2) + lane].product.b[half + i];
            c[e] += left * right;
        }
}

void multiply(Type type, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int line)
{
    const auto act = type == Type::tf32 ? multiply<Type::tf32> : type == Type::f16 ? multiply<Type::f16> : multiply<Type::bf16>;
    act(c, a, b0, b1, line);
}

// ---- blocks and launches

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
    memset(shared, 0xff, sizeof shared);
    memset(units, 0, sizeof units);
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.started = false;
        fiber.first = fiber.last = fiber.group_count = fiber.meetings = fiber.barriers = 0;
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

const char* launch(void (*kernel)(), int blocks, int threads, int shared_bytes, uint64_t seed, char* memory, int)
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
            const unsigned char* end = shared + shared_bytes;
            if (*end != 0xff || memcmp(end, end + 1, sizeof shared - shared_bytes - 1) != 0)
                fail("a write past the end of shared memory", 0);
        }
    sigaction(SIGSEGV, &before[0], nullptr);
    sigaction(SIGBUS, &before[1], nullptr);
    sigaction(SIGFPE, &before[2], nullptr);
    return problem;
}

}  // namespace simt
