// What a block of a Hopper kernel is while a CPU runs it; a part of sm90/simt_machine.h.
#pragma once

#include "simt_calls.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

namespace simt {

constexpr int MOST_WARPS = 32, THREADS = WARP * MOST_WARPS, STACK = 128 * 1024, UNIT = 16;
constexpr int BARRIERS = 96, COPIES = 512, SUMS = 12, PRODUCTS = 512, OPERANDS = 96;
constexpr int CHUNKS = 1024, ARRIVALS = 64, UNTOLD = -1;  // of cp.async: copies and arrivals of a thread under way
constexpr int MOST_CLUSTER = 2;  // blocks that share tiles

// What is known to have happened in a block. Of every warp: its generic writes of shared memory up to an arrival, its generic reads, the
// groups of wgmma and of bulk stores that it has waited for; of every mbarrier: the phases completed, and those followed by a
// fence.proxy.async of some thread.
struct Known {
    u32 ticks[MOST_WARPS], reads[MOST_WARPS], groups[MOST_WARPS], bulks[MOST_WARPS], phases[BARRIERS], fenced[BARRIERS];
};

// What a warp knows of all blocks of its cluster, from what it has waited for (a vector clock).
struct Clock {
    Known of[MOST_CLUSTER];

    void join(const Clock& other)
    {
        u32* mine = of[0].ticks;
        const u32* theirs = other.of[0].ticks;
        for (unsigned i = 0; i < cluster_size * sizeof(Known) / sizeof(u32); ++i)
            mine[i] = mine[i] > theirs[i] ? mine[i] : theirs[i];
    }

    void take(const Clock& other) { memcpy(of, other.of, cluster_size * sizeof(Known)); }
};

// The history of 16 bytes of shared memory: the last writer, and possible readers.
struct Unit {
    int writer;  // thread of the last generic write + 1, or 0
    u32 tick, sync;           // of its warp, then
    bool fenced;              // a thread that knows of it has issued fence.proxy.async since
    u32 listed;               // a bit for each warp that has it in `Warp::written`
    int barrier;              // mbarrier of the last copy + 1, or 0; UNTOLD: none tells of it
    u32 phase;                // of that barrier, in which the copy counts
    int copier;               // thread of the last cp.async + 1, or 0
    int bulk_warp;            // warp whose bulk store read them last + 1, or 0
    u32 bulk, groups[MOST_WARPS];  // number of that store; of every warp, the last group of wgmma that reads them
    u32 reads[MOST_WARPS];         // of every warp, which of its reads was the last generic one
    int reader;                    // warp of the last generic read + 1, or 0
    u32 read_tick;                 // of that warp, then
};

struct Barrier {
    u32 place, count, phase;
    int pending, copies, line;  // arrivals to come, copies under way in this phase, where it was made
    int64_t bytes;              // expected and not yet there
    int maker;                  // warp
    u32 tick;
    bool visible;  // to the async proxy
    Clock clock, done;
};

struct Named {
    int expected, arrived, line;  // line: that of bar.sync
    u32 generation, warps;        // warps: which have arrived, by bits
    Clock clock, done;
};

// What a tensor map says; CUtensorMap, which is opaque, has the same 128 bytes.
struct alignas(64) Map {
    u64 base;
    u32 rank, element_bytes;
    u64 sizes[5], strides[4];  // of dimension 0, the innermost, the stride is one element; the others' in bytes
    u32 box[5], swizzle;       // bytes of the swizzle's span: 0, 32, 64 or 128
};
static_assert(sizeof(Map) == 128, "the size of a CUtensorMap");

struct Copy {
    bool live, made, read;
    Kind kind;
    Map map;
    int at[5];
    u32 place, bytes;
    void* global;
    int barrier, thread;
    u32 phase, group, number;  // group: of the thread's bulk stores; number: of the warp's
    unsigned char* kept;       // what a store has read and not yet written
    int word;                  // of another block
};

// Accumulators of a warp's wgmmas, its 16 rows; the registers are poisoned while they are in flight.
struct Sum {
    float* lanes[WARP];
    int n;
    bool flying;
    u32 group, fences;  // last group that adds to them; fences when they were handed back
    float rows[16][256];
};

struct Product {
    int sum, n;
    bool from_registers, transposed_a, transposed_b, accumulate, is_f16;
    u32 a[WARP][4];
    const u32* registers[WARP];
    u64 left, right;
    u32 group;
    bool done;
};

// Registers that were an operand A, as they were at the last wgmma.fence.
struct Operand {
    const u32* lanes[WARP];
    u32 fences, value[WARP][4];
};

// That a lane has waited for a phase of an mbarrier, its number + 1, and has arrived at another since; how often its warp had met.
struct Early { int waited, arrived, lane; u32 waited_phase, arrived_phase, meetings; };

struct Warp {
    int arrived;  // lanes at the collective instruction
    u32 meetings;  // at one, all lanes
    Early early[8];
    u32 early_count;
    Clock clock;
    u32 tick, sync, stores;  // numbers of the next release and __syncwarp; bulk stores issued
    u32 reads;               // how often lanes have met behind a fence.proxy.async: reads before are done, for copies too
    bool fenced;             // since the last time
    int registers, set_registers, written_count;
    u32 written[MOST_SHARED / UNIT];  // places of 16 bytes, each once, since the last fence.proxy.async
    u32 fences, committed, retired, flow[64];  // wgmma: fences, groups, what was issued up to a commit
    u32 issued;                                // a hash of the wgmmas
    Sum sums[SUMS];
    Product products[PRODUCTS];
    int first, last;
    Operand operands[OPERANDS];
    int operand_count;
    bool open;
};

struct Wait {
    enum Of { turn, barrier, named, registers, memory, cluster } of;
    int object;
    u32 value;
    const volatile int* place;
    int line;
};

enum class At : unsigned char { ready, collective, waiting, end };

struct Lane {
    ucontext_t start;
    jmp_buf resume;
    bool started;
    At at;
    int line, kind, turn;
    Wait wait;
    Early waited, late[4];  // the last wait; what other lanes did behind it before this one had waited, and it has not done
    int late_count;
    u32 groups;  // of bulk stores, committed
    struct { u32 place, bytes; const void* from; } chunks[CHUNKS];  // cp.async: from the first that is under way to the last; then zeros
    struct { u32 chunk, phase; int barrier; } arrivals[ARRIVALS];  // and arrivals behind them; chunk: the one behind its last
    u32 first_chunk, last_chunk, told_chunk, first_arrival, last_arrival;  // told_chunk: the first that no arrival stands behind
};

// What the lanes of a warp show each other at an instruction; two, so that a fast lane's next does not hide this one.
union Show {
    const unsigned char* row;
    float value;
    u32 word, words[6];
    bool flag;
    struct { float* sum; const u32* a; u64 left, right; } product;
};

// Blocks that run at the same time, and see each other's shared memory.
struct Cluster {
    struct Block* blocks[MOST_CLUSTER];
    int arrived;  // threads at barrier.cluster
    u32 generation;
    Clock clock, done;
};

struct Block {
    Dim index;
    bool live;
    int rank;  // in its cluster
    Cluster* cluster;
    u32 touched[MOST_CLUSTER][MOST_WARPS];  // when warps of other blocks have last arrived at barriers of this one, by their ticks
    int free_registers, barrier_count, ended;
    Lane* lanes;
    char* stacks;
    Warp* warps;
    Unit* units;
    unsigned char* memory;  // its shared memory while another block runs
    Barrier barriers[BARRIERS];
    Named named[16];
    Copy copies[COPIES];
    int copy_count;
    int copying[THREADS], copying_count;  // threads with arrivals of cp.async under way
    Show shown[2][THREADS];
};

static Block* block;
static Block* there;  // whose shared memory and mbarriers are meant: that block, or another one of its cluster
static int used_bytes;  // of shared memory
static int resident_blocks;  // on a multiprocessor: they share its registers
static u32 idle;             // turns in which nothing happened
static jmp_buf scheduler, escape;
static uint64_t random_state;
static char message[4096];

}  // namespace simt
