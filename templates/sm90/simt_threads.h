// Threads, warps and blocks as fibers, taking turns in an order that a seed shuffles; a part of sm90/simt.h.
//
// A thread runs until it waits or comes to an instruction that its whole warp executes together; the last lane to come executes it.
// Warps take turns at random; one of them lags behind or runs ahead for a while, now and then another. A few blocks run at once.
#pragma once

namespace simt {

SIMT u32 random_word()
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return u32(random_state >> 16);
}

SIMT bool chance(u32 of) { return random_word() % of == 0; }

SIMT void say_all(const char* format, va_list values)
{
    const size_t length = strlen(message);
    vsnprintf(message + length, sizeof message - length, format, values);
}

SIMT void say(const char* format, ...)
{
    va_list values;
    va_start(values, format);
    say_all(format, values);
    va_end(values);
}

[[noreturn]] SIMT void fail(int line, const char* format, ...)
{
    message[0] = 0;
    say("block %u, thread %d (warp %d), line %d: ", blockIdx.x, current, current / WARP, line);
    va_list values;
    va_start(values, format);
    say_all(format, values);
    va_end(values);
    _longjmp(escape, 1);
}

// What g++ calls where an address is not aligned as its type is (-fsanitize=alignment): libubsan has the layout.
struct Mismatch { const char* file; u32 line, column; const void* type; unsigned char log2_of_alignment, kind; };
extern "C" SIMT void __ubsan_handle_type_mismatch_v1(const Mismatch* found, void*)
{
    if (found->log2_of_alignment <= 4)  // no instruction accesses more
        fail(int(found->line), "an access at an address that is not a multiple of %u", 1u << found->log2_of_alignment);
}

SIMT Lane& lane_now() { return block->lanes[current]; }
SIMT Warp& warp_now() { return block->warps[current / WARP]; }
SIMT Known& known_here() { return warp_now().clock.of[block->rank]; }
SIMT Known& known_there() { return warp_now().clock.of[there->rank]; }

SIMT bool copy_something();
SIMT void settle(Cluster&);
SIMT void check_end();

SIMT bool over(const Wait& wait)
{
    switch (wait.of) {
    case Wait::barrier: return (block->barriers[wait.object].phase & 1) != wait.value;
    case Wait::named: return block->named[wait.object].generation != wait.value;
    case Wait::registers:
        return block->free_registers >= (int(wait.value) - block->warps[wait.object].registers) * WARP;
    case Wait::memory: return *wait.place == int(wait.value);
    case Wait::cluster: return block->cluster->generation != wait.value;
    default: return true;
    }
}

SIMT bool able(const Lane& lane) { return lane.at == At::ready || (lane.at == At::waiting && over(lane.wait)); }

SIMT_STATE void (*body)();

SIMT void run()
{
    body();
    check_end();
    Lane& me = lane_now();
    me.at = At::end;
    idle = 0;
    ++block->ended;
    settle(*block->cluster);
    _longjmp(scheduler, 1);
}

SIMT void enter(int thread)
{
    current = thread;
    threadIdx.x = thread;
    Lane& lane = block->lanes[thread];
    lane.at = At::ready;
    if (lane.started)
        _longjmp(lane.resume, 1);
    lane.started = true;
    setcontext(&lane.start);
}

// This thread stops; another lane of its warp goes on, or the scheduler.
SIMT void leave()
{
    Lane& me = lane_now();
    if (_setjmp(me.resume))
        return;
    const int first = current / WARP * WARP;
    for (int i = 1; i < WARP; ++i) {
        const int next = first + (current + i) % WARP;
        if (able(block->lanes[next]))
            enter(next);
    }
    _longjmp(scheduler, 1);
}

SIMT void give_turn()
{
    if (_setjmp(lane_now().resume))
        return;
    _longjmp(scheduler, 1);
}

SIMT void wait_for(const Wait& wait)
{
    while (!over(wait)) {
        lane_now().at = At::waiting;
        lane_now().wait = wait;
        leave();
    }
}

// Waits until all lanes of the warp are here. Returns true in the last one to come: what it does before `go_on` is done for all.
SIMT bool is_last(int kind, int line)
{
    Lane& me = lane_now();
    Warp& warp = warp_now();
    Lane* lanes = block->lanes + current / WARP * WARP;
    me.kind = kind;
    me.line = line;
    if (++warp.arrived < WARP) {
        me.at = At::collective;
        leave();
        return false;
    }
    warp.arrived = 0;
    ++warp.meetings;
    idle = 0;
    for (int i = 0; i < WARP; ++i)
        if (lanes[i].line != line || lanes[i].kind != kind)
            fail(line, "lanes of a warp are at different instructions (lane %d at line %d)", i, lanes[i].line);
    for (int i = 0; i < WARP; ++i)
        if (lanes[i].late_count)
            fail(line, "a late lane: lane %d has waited for a phase, and arrived at an mbarrier, before lane %d had waited for it:"
                 " without a __syncwarp the phase may have passed", lanes[i].late[0].lane, i);
    if (kind == SYNC || kind == NAMED) {
        ++warp.sync;
        warp.reads += warp.fenced;
        warp.fenced = false;
    }
    return true;
}

SIMT void go_on()
{
    Lane* lanes = block->lanes + current / WARP * WARP;
    for (int i = 0; i < WARP; ++i)
        lanes[i].at = At::ready;
    if (chance(8))
        give_turn();
}

// Executes `act` once for the warp when all its lanes are here. Returns whether this lane did.
template <class Act>
static bool together(int kind, int line, Act act)
{
    if (!is_last(kind, line))
        return false;
    act();
    go_on();
    return true;
}

SIMT bool together(int kind, int line)
{
    return together(kind, line, [] {});
}

// Every lane shows something to all lanes.
template <class Fill>
static const Show* exchange(int kind, int line, Fill fill)
{
    Show* shown = block->shown[lane_now().turn++ & 1];
    fill(shown[current]);
    const int first = current / WARP * WARP;
    together(kind, line);
    return shown + first;
}

// Does something with the shared memory of a block of the cluster, which is there until its last thread has ended.
template <class Act>
static void in_block(int rank, int line, Act act)
{
    if (rank < 0 || rank >= cluster_size)
        fail(line, "block %d of a cluster of %d", rank, cluster_size);
    there = block->cluster->blocks[rank];
    if (!there->live || there->ended == threads_of_block)
        fail(line, "block %u of the cluster has ended", there->index.x);
    act();
    there = block;
}

SIMT void describe(const Named& named)
{
    say("where %d of %d threads are", named.arrived, named.expected);
    for (int first = 0, told = 0; first < MOST_WARPS; ++first) {
        int last = first;
        while (last < MOST_WARPS && named.warps >> last & 1)
            ++last;
        if (last > first)
            say(last == first + 1 ? "%s%d" : "%s%d-%d", told++ ? ", " : " (warps ", first, last - 1), first = last;
    }
    if (named.warps)
        say(")");
}

SIMT void describe(const Wait& wait)
{
    const Barrier& barrier = block->barriers[wait.object];
    const Named& named = block->named[wait.object];
    switch (wait.of) {
    case Wait::barrier:
        say("for phase %u (parity %u) of the mbarrier at shared + %u (initialised at line %d), which lacks %d of %u arrivals and "
            "%lld bytes",
            barrier.phase, wait.value, barrier.place - BASE, barrier.line, barrier.pending, barrier.count,
            (long long)barrier.bytes);
        break;
    case Wait::named:
        say("at barrier %d, ", wait.object);
        describe(named);
        break;
    case Wait::registers:
        say("in setmaxnreg.inc for %d more registers per thread, of which %d are free",
            int(wait.value) - block->warps[wait.object].registers, block->free_registers / WARP);
        break;
    case Wait::memory: say("for a %d in global memory, where a %d is", int(wait.value), *wait.place); break;
    case Wait::cluster: say("at barrier.cluster, where %d threads are", block->cluster->arrived); break;
    default: say("in a loop");
    }
}

// What the lanes of a warp wait for, one clause for all that wait for the same.
SIMT void describe(int warp)
{
    const Lane* lanes = block->lanes + warp * WARP;
    for (int i = 0; i < WARP; ++i) {
        const Lane& lane = lanes[i];
        const auto same = [&](const Lane& other) {
            return lane.at == other.at && (lane.at == At::waiting ? lane.wait.line == other.wait.line : lane.line == other.line);
        };
        if (lane.at == At::end || (i > 0 && same(lanes[i - 1])))
            continue;
        int last = i;
        while (last + 1 < WARP && same(lanes[last + 1]))
            ++last;
        if (last - i + 1 < WARP)
            say(i == last ? ", lane %d" : ", lanes %d-%d", i, last);
        if (lane.at == At::collective) {
            say(", line %d: wait for the other lanes of their warp", lane.line);
            continue;
        }
        say(", line %d: wait ", lane.wait.line);
        describe(lane.wait);
    }
}

// Says which warps wait for what, where no warp can go on.
[[noreturn]] SIMT void deadlock()
{
    static char all[sizeof message], before[sizeof message];
    char* end = all + snprintf(all, sizeof all, "block %u: a deadlock", block->index.x);
    before[0] = 0;
    int first = 0;
    for (int warp = 0; warp <= threads_of_block / WARP; ++warp) {  // warps that wait for the same share a line
        message[0] = 0;
        if (warp < threads_of_block / WARP)
            describe(warp);
        if (warp > 0 && strcmp(message, before) != 0) {
            char waiting[32];
            snprintf(waiting, sizeof waiting, first == warp - 1 ? "warp %d" : "warps %d-%d", first, warp - 1);
            if (before[0])
                end += snprintf(end, all + sizeof all - end, "\n  %s%s", waiting, before);
            if (end >= all + sizeof all)
                break;
            first = warp;
        }
        strcpy(before, message);
    }
    strcpy(message, all);
    _longjmp(escape, 1);
}

SIMT void start_block(Block& of, Dim index, Cluster& cluster, int rank)
{
    const int warps = threads_of_block / WARP;
    of.index = index;
    of.live = true;
    of.cluster = &cluster;
    of.rank = rank;
    memset(of.touched, 0, sizeof of.touched);
    of.ended = of.barrier_count = of.copy_count = of.copying_count = of.free_registers = 0;
    memset(of.memory, 0xff, used_bytes);
    memset(of.units, 0, sizeof(Unit) * ((used_bytes + UNIT - 1) / UNIT));
    memset(of.named, 0, sizeof of.named);
    const int allowed = 65536 / (threads_of_block * resident_blocks) / 8 * 8;
    for (int i = 0; i < warps; ++i) {
        Warp& warp = of.warps[i];
        warp.arrived = warp.first = warp.last = warp.operand_count = warp.set_registers = warp.written_count = 0;
        warp.fences = warp.committed = warp.retired = warp.issued = warp.stores = 0;
        warp.open = false;
        warp.tick = 1;
        warp.sync = warp.reads = warp.meetings = warp.early_count = 0;
        memset(warp.early, 0, sizeof warp.early);
        warp.fenced = false;
        warp.registers = allowed < 256 ? allowed : 256;
        memset(&warp.clock, 0, sizeof warp.clock);
        for (Sum& sum : warp.sums)
            sum.lanes[0] = nullptr, sum.flying = false;
    }
    for (int i = 0; i < threads_of_block; ++i) {
        Lane& lane = of.lanes[i];
        lane.started = false;
        lane.at = At::ready;
        lane.turn = lane.line = lane.kind = 0;
        lane.groups = 0;
        lane.waited = {};
        lane.late_count = 0;
        lane.first_chunk = lane.last_chunk = lane.told_chunk = lane.first_arrival = lane.last_arrival = 0;
    }
}

// Once for all blocks of a launch that run here: `run` never returns, so what it starts from stays as it is.
SIMT void make_contexts(Block& of)
{
    for (int i = 0; i < threads_of_block; ++i) {
        ucontext_t& start = of.lanes[i].start;
        getcontext(&start);
        start.uc_stack.ss_sp = of.stacks + size_t(i) * STACK;
        start.uc_stack.ss_size = STACK;
        start.uc_link = nullptr;
        makecontext(&start, run, 0);
    }
}

SIMT void activate(Block& next)
{
    if (block != &next) {
        if (block && block->live)
            memcpy(block->memory, shared, used_bytes);
        block = there = &next;
        memcpy(shared, next.memory, used_bytes);
    }
    blockIdx = next.index;
}

SIMT_STATE int favoured, steps;
constexpr int MOST_PLACES = 4;

// The next warp of this block to run, or -1: mostly by an order that changes now and then, so that some lag far behind.
SIMT int next_warp()
{
    int able_warps[MOST_WARPS], count = 0;
    for (int warp = 0; warp < threads_of_block / WARP; ++warp)
        for (int i = 0; i < WARP; ++i)
            if (able(block->lanes[warp * WARP + i])) {
                able_warps[count++] = warp;
                break;
            }
    if (count == 0)
        return -1;
    if (++steps % 64 == 0)
        favoured = int(random_word() % 97);
    return able_warps[chance(4) ? random_word() % count : favoured % count];
}

SIMT void run_warp(int warp)
{
    if (_setjmp(scheduler))
        return;
    const int first = warp * WARP;
    int start = int(random_word() % WARP);
    for (int i = 0; i < WARP; ++i)
        if (able(block->lanes[first + (start + i) % WARP]))
            enter(first + (start + i) % WARP);
}

SIMT void check_copies();
SIMT void check_arrivals();

SIMT void finish_block()
{
    check_copies();
    check_arrivals();
    const unsigned char* end = shared + used_bytes;
    if (end[0] != 0xff || memcmp(end, end + 1, sizeof shared - used_bytes - 1) != 0) {
        while (*end == 0xff)
            ++end;
        message[0] = 0;
        say("block %u: a write past the end of shared memory, at + %zu", block->index.x, size_t(end - shared));
        _longjmp(escape, 1);
    }
    for (const Named& named : block->named)
        if (named.arrived) {
            message[0] = 0;
            say("block %u: ends with arrivals at barrier %d that no thread has waited for, ", block->index.x, int(&named - block->named));
            describe(named);
            _longjmp(escape, 1);
        }
    block->live = false;
}

SIMT void run_blocks(Dim grid, Block* blocks, int places, uint64_t seed)
{
    static Cluster clusters[MOST_PLACES];
    const unsigned total = grid.x / cluster_size, from = u32(seed * 0x9E3779B97F4A7C15ull >> 33) % total;
    unsigned started = 0;
    block = there = nullptr;
    for (int i = 0; i < places; ++i)
        make_contexts(blocks[i]);
    memset(shared, 0xff, sizeof shared);
    const auto fill = [&](int first) {  // the places of a cluster
        const unsigned turned = (from + started++) % total, n = seed % 2 ? turned : total - 1 - turned;
        Cluster& cluster = clusters[first];
        memset(&cluster, 0, sizeof cluster);
        for (int rank = 0; rank < cluster_size; ++rank) {
            cluster.blocks[rank] = &blocks[first + rank];
            start_block(blocks[first + rank], {n * cluster_size + rank, 0, 0}, cluster, rank);
        }
    };
    for (int i = 0; i < places; i += cluster_size)
        fill(i);
    for (int live = places; live > 0;) {
        Block* next = block && block->live && !chance(32) ? block : nullptr;
        while (!next) {
            Block& one = blocks[random_word() % places];
            next = one.live ? &one : nullptr;
        }
        activate(*next);
        if (chance(4))
            copy_something();
        int warp = next_warp();
        // no warp of this block can go on: a copy may help, or another block
        const int here = int(block - blocks);
        for (int i = 1; warp < 0 && block->ended < threads_of_block;) {
            if (copy_something())
                warp = next_warp();
            else if (i >= places)
                deadlock();
            else if (Block& one = blocks[(here + i++) % places]; one.live) {
                activate(one);
                warp = next_warp();
            }
        }
        if (warp >= 0) {
            if (++idle > 200000)
                deadlock();
            run_warp(warp);
        }
        if (block->ended == threads_of_block) {
            finish_block();
            --live;
            const int first = int(block - blocks) / cluster_size * cluster_size;
            bool over = true;
            for (int rank = 0; rank < cluster_size; ++rank)
                over &= !blocks[first + rank].live;
            if (over && started < total) {
                memset(shared, 0xff, sizeof shared);
                block = there = nullptr;
                fill(first);
                live += cluster_size;
            }
        }
    }
}

// An access to memory that the process has not is a fault of the kernel's. The signal may come again: nothing returns from here.
SIMT void stray(int) { fail(0, "an access outside of all memory"); }
SIMT void divided(int) { fail(0, "a division by zero"); }

// Runs a kernel over a grid. Returns what went wrong, or null. memory: for stacks and state of blocks; resident: blocks of a
// multiprocessor; cluster: blocks of a cluster.
SIMT const char* launch(void (*kernel)(), int grid_size, int threads, int bytes, uint64_t seed, char* memory, int resident, int cluster)
{
    const Dim grid = {unsigned(grid_size), 1, 1};
    const int most = cluster > 1 ? MOST_PLACES : 3, places = grid_size < most ? grid_size : most;
    if (grid_size == 0)
        return nullptr;
    static Block blocks[MOST_PLACES];
    cluster_size = cluster;
    body = kernel;
    gridDim = grid;
    blockDim = {unsigned(threads), 1, 1};
    threads_of_block = threads;
    resident_blocks = resident;
    used_bytes = bytes;
    idle = 0;
    random_state = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
    for (int i = 0; i < 4; ++i)
        random_word();
    steps = favoured = 0;  // the order follows from the seed alone, whatever was launched before
    const auto take = [&](auto& place, size_t bytes) {
        place = (decltype(&*place))memory;
        memory += (bytes + 4095) / 4096 * 4096;
    };
    for (int i = 0; i < places; ++i) {
        take(blocks[i].lanes, sizeof(Lane) * threads);
        take(blocks[i].stacks, size_t(STACK) * threads);
        take(blocks[i].warps, sizeof(Warp) * (threads / WARP));
        take(blocks[i].units, sizeof(Unit) * (MOST_SHARED / UNIT));
        take(blocks[i].memory, MOST_SHARED);
    }
    const char* problem = nullptr;
    there = nullptr;
    struct sigaction faults = {}, before[3];
    faults.sa_handler = stray;
    faults.sa_flags = SA_NODEFER;
    sigaction(SIGSEGV, &faults, &before[0]);
    sigaction(SIGBUS, &faults, &before[1]);
    faults.sa_handler = divided;
    sigaction(SIGFPE, &faults, &before[2]);
    if (threads % 32 || threads > THREADS || bytes > MOST_SHARED) {
        snprintf(message, sizeof message, "a launch with %d threads and %d bytes of shared memory", threads, bytes);
        problem = message;
    } else if (cluster < 1 || cluster > MOST_CLUSTER || grid_size % cluster) {
        snprintf(message, sizeof message, "a launch with %d blocks in clusters of %d", grid_size, cluster);
        problem = message;
    } else if (_setjmp(escape))
        problem = message;
    else
        run_blocks(grid, blocks, places, seed);
    sigaction(SIGSEGV, &before[0], nullptr);
    sigaction(SIGBUS, &before[1], nullptr);
    sigaction(SIGFPE, &before[2], nullptr);
    return problem;
}

}  // namespace simt
