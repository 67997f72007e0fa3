// Shared memory with its history, mbarriers, named barriers and registers; a part of sm90/simt.h.
//
// An order of two accesses counts only if something was waited for that says so: what a warp knows is a vector clock (Mattern 1989),
// which mbarriers and barriers hand on. So a race is a fault in every order of execution, not only in those in which it does harm.
#pragma once

namespace simt {

SIMT unsigned char* at(u32 place, u32 bytes, u32 aligned, int line, const char* what)
{
    if (place < BASE || place + bytes > BASE + u32(used_bytes))
        fail(line, "%s outside of shared memory: shared + %d, %u bytes", what, int(place) - BASE, bytes);
    if (place % aligned)
        fail(line, "%s at shared + %u, which is not a multiple of %u", what, place - BASE, aligned);
    return shared + (place - BASE);
}

SIMT Unit& unit(u32 place) { return there->units[(place - BASE) / UNIT]; }

// Whether what was copied here has arrived, for all that this warp has waited for.
SIMT bool arrived(const Unit& one)
{
    return !one.barrier || (one.barrier != UNTOLD && known_there().phases[one.barrier - 1] > one.phase);
}

// All that may still read these 16 bytes must be known to be done.
SIMT void check_readers(const Unit& one, u32 place, int line, const char* what)
{
    const Known& known = known_there();
    for (int warp = 0; warp < threads_of_block / WARP; ++warp)
        if (one.groups[warp] > known.groups[warp])
            fail(line, "%s overwrites shared + %u, which a wgmma of warp %d may still read", what, place - BASE, warp);
    if (one.bulk_warp && one.bulk > known.bulks[one.bulk_warp - 1])
        fail(line, "%s overwrites shared + %u, which an asynchronous store of warp %d may still read", what, place - BASE,
             one.bulk_warp - 1);
    if (!arrived(one))
        fail(line, "%s overwrites shared + %u, where a copy has not arrived yet", what, place - BASE);
}

// An ordinary write of `bytes`, by an instruction that has a name.
SIMT void wrote(u32 place, u32 bytes, int line)
{
    Warp& warp = warp_now();
    for (u32 p = place / UNIT * UNIT; p < place + bytes; p += UNIT) {
        Unit& one = unit(p);
        check_readers(one, p, line, "a write");
        one.writer = current + 1;
        one.tick = warp.tick;
        one.sync = warp.sync;
        one.fenced = false;
        one.barrier = one.copier = 0;
        const u32 mine = 1u << current / WARP;
        if (!(one.listed & mine))
            warp.written[warp.written_count++] = p;
        one.listed |= mine;
    }
}

// fence.proxy.async: of all writes that this warp knows of, its own and others'.
SIMT void fence_proxy()
{
    Known& known = known_here();
    memcpy(known.fenced, known.phases, sizeof known.fenced);  // what it knows to be fenced it knows to be there
    warp_now().fenced = true;
    for (int from = 0; from < threads_of_block / WARP; ++from) {
        Warp& writer = block->warps[from];
        int left = 0;
        for (int i = 0; i < writer.written_count; ++i) {
            Unit& one = unit(writer.written[i]);
            const bool is_last = one.writer && (one.writer - 1) / WARP == from;  // no other thread has written there since
            if (is_last && from != current / WARP && one.tick > known_here().ticks[from]) {
                writer.written[left++] = writer.written[i];
                continue;
            }
            one.fenced |= is_last;
            one.listed &= ~(1u << from);
        }
        writer.written_count = left;
    }
    for (int i = 0; i < block->barrier_count; ++i)
        if (Barrier& barrier = block->barriers[i]; barrier.maker == current / WARP)
            barrier.visible = true;
}

// A read of 16 bytes by the asynchronous proxy: of wgmma or of a store.
SIMT void check_async_read(const Unit& one, u32 place, int line, const char* what)
{
    if (one.barrier == UNTOLD)
        fail(line, "%s reads shared + %u, where a copy of thread %d has not arrived yet, of which no mbarrier tells", what, place - BASE,
             one.copier - 1);
    if (!arrived(one))
        fail(line, "%s reads shared + %u, where a copy has not arrived yet (phase %u of the mbarrier at shared + %u was not waited for)",
             what, place - BASE, one.phase, block->barriers[one.barrier - 1].place - BASE);
    if (one.copier && known_here().fenced[one.barrier - 1] <= one.phase)
        fail(line, "%s reads shared + %u, which thread %d copied by cp.async, without a fence.proxy.async since it is there", what,
             place - BASE, one.copier - 1);
    if (!one.writer)
        return;
    const int writer = one.writer - 1;
    if (!one.fenced)
        fail(line, "%s reads shared + %u, which thread %d wrote without a fence.proxy.async", what, place - BASE, writer);
    if (writer / WARP == current / WARP && writer != current && one.sync == warp_now().sync)
        fail(line, "%s reads shared + %u, which lane %d wrote without a __syncwarp since", what, place - BASE, writer % WARP);
    if (writer / WARP != current / WARP && known_here().ticks[writer / WARP] < one.tick)
        fail(line, "%s reads shared + %u, which warp %d wrote without a barrier between them", what, place - BASE, writer / WARP);
}

// A read by a load that has a name.
SIMT void check_read(u32 place, u32 bytes, int line)
{
    for (u32 p = place / UNIT * UNIT; p < place + bytes; p += UNIT) {
        Unit& one = unit(p);
        one.reads[current / WARP] = warp_now().reads + 1;
        one.reader = current / WARP + 1;
        one.read_tick = warp_now().tick;
        if (!arrived(one))
            fail(line, "a load of shared + %u, where a copy has not arrived yet", p - BASE);
        if (one.writer && (one.writer - 1) / WARP != current / WARP
            && known_here().ticks[(one.writer - 1) / WARP] < one.tick)
            fail(line, "a load of shared + %u, which warp %d wrote without a barrier between them", p - BASE,
                 (one.writer - 1) / WARP);
    }
}

// What this warp knows goes into `to`; what it does from here on is later.
SIMT void release(Clock& to)
{
    Warp& warp = warp_now();
    known_here().ticks[current / WARP] = warp.tick++;
    known_here().reads[current / WARP] = warp.reads;
    to.join(warp.clock);
}

SIMT Barrier& barrier_at(u32 place, int line)
{
    const char* whose = there == block ? "" : " of another block";
    for (int i = 0; i < there->barrier_count; ++i)
        if (Barrier& barrier = there->barriers[i]; barrier.place == place) {
            if ((there != block || barrier.maker != current / WARP) && known_there().ticks[barrier.maker] < barrier.tick)
                fail(line, "an mbarrier%s that warp %d has initialised without a barrier since", whose, barrier.maker);
            return barrier;
        }
    fail(line, "no mbarrier%s has been initialised at shared + %d", whose, int(place) - int(BASE));
}

SIMT int number_of(const Barrier& barrier) { return int(&barrier - there->barriers); }

SIMT void settle(Barrier& barrier, int line)
{
    if (barrier.pending || barrier.bytes)
        return;
    if (barrier.copies)
        fail(line, "phase %u of the mbarrier at shared + %u completes while %d of its copies are under way: too few bytes expected, or too few arrivals",
             barrier.phase, barrier.place - BASE, barrier.copies);
    ++barrier.phase;
    barrier.pending = int(barrier.count);
    barrier.done.take(barrier.clock);
}

SIMT void barrier_init(u32 place, u32 count, int line)
{
    at(place, 8, 8, line, "an mbarrier");
    if (count == 0 || count >= 1u << 20)
        fail(line, "an mbarrier for %u arrivals", count);
    int i = 0;
    while (i < block->barrier_count && block->barriers[i].place != place)
        ++i;
    if (i == BARRIERS)
        fail(line, "more than %d mbarriers", BARRIERS);
    if (i == block->barrier_count)
        ++block->barrier_count;
    Barrier& barrier = block->barriers[i];
    memset(&barrier, 0, sizeof barrier);
    barrier.place = place;
    barrier.count = count;
    barrier.pending = int(count);
    barrier.line = line;
    barrier.maker = current / WARP;
    barrier.tick = warp_now().tick;
}

// A lane that has waited for a phase, and arrives at an mbarrier before others of its warp have waited, may let that phase pass:
// unless they arrive there too, those wait for ever.
SIMT void note_arrival(const Barrier& barrier)
{
    Warp& warp = warp_now();
    Lane& me = lane_now();
    for (int i = 0; i < me.late_count; ++i)
        if (me.late[i].arrived == number_of(barrier) && me.late[i].arrived_phase == barrier.phase)
            me.late[i--] = me.late[--me.late_count];
    if (!me.waited.waited || me.waited.meetings != warp.meetings || there != block)
        return;
    Early& early = warp.early[warp.early_count++ % 8];
    early = me.waited;
    early.arrived = number_of(barrier);
    early.arrived_phase = barrier.phase;
}

SIMT void note_wait(const Barrier& barrier)
{
    Warp& warp = warp_now();
    Lane& me = lane_now();
    me.waited = {number_of(barrier) + 1, 0, current % WARP, barrier.phase, 0, warp.meetings};
    for (const Early& one : warp.early)
        if (one.waited == me.waited.waited && one.waited_phase == barrier.phase && one.meetings == warp.meetings
            && one.lane != me.waited.lane && me.late_count < 4)
            me.late[me.late_count++] = one;
}

SIMT void arrive_at(u32 place, u32 bytes, int line)
{
    Barrier& barrier = barrier_at(place, line);
    if (bytes && !barrier.visible)
        fail(line, "an mbarrier for a copy, without fence.mbarrier_init or fence.proxy.async after its initialisation");
    if (barrier.pending == 0)
        fail(line, "more than %u arrivals in phase %u of the mbarrier at shared + %u", barrier.count, barrier.phase, place - BASE);
    idle = 0;
    note_arrival(barrier);
    release(barrier.clock);
    barrier.bytes += bytes;
    if (barrier.bytes >= 1 << 20)
        fail(line, "an mbarrier counts less than 1 MB: %lld bytes are expected", (long long)barrier.bytes);
    --barrier.pending;
    settle(barrier, line);
}

SIMT void barrier_arrive(u32 place, u32 bytes, int line)
{
    arrive_at(place, bytes, line);
    if (chance(8))
        give_turn();
}

// At the barrier of another block of the cluster.
static void remote_arrive(u32 place, int rank, int line)
{
    in_block(rank, line, [&] {
        there->touched[block->rank][current / WARP] = warp_now().tick;
        arrive_at(place, 0, line);
    });
    if (chance(8))
        give_turn();
}

int block_rank() { return block->rank; }

// At the barrier of every block of the cluster, the own one first.
void cluster_arrive(u32 place, int line)
{
    barrier_arrive(place, 0, line);
    for (int rank = 0; rank < cluster_size; ++rank)
        if (rank != block->rank)
            remote_arrive(place, rank, line);
}

SIMT bool barrier_passed(u32 place, u32 parity, int line)
{
    Barrier& barrier = barrier_at(place, line);
    if (parity > 1)
        fail(line, "a parity of %u", parity);
    if ((barrier.phase & 1) == parity)
        return false;
    note_wait(barrier);
    Clock& clock = warp_now().clock;
    clock.join(barrier.done);
    known_here().phases[number_of(barrier)] = barrier.phase;
    return true;
}

SIMT void barrier_wait(u32 place, u32 parity, int line)
{
    if (chance(8))
        give_turn();
    while (!barrier_passed(place, parity, line))
        wait_for({Wait::barrier, number_of(barrier_at(place, line)), parity, nullptr, line});
}

SIMT void named_barrier(int id, int threads, Meeting meeting, int line)
{
    if (id < 0 || id > 15 || threads <= 0 || threads % WARP || threads > threads_of_block)
        fail(line, "barrier %d for %d threads", id, threads);
    Named& named = block->named[id];
    together(NAMED, line, [&] {
        if (named.arrived == 0)
            named.expected = threads;
        if (named.expected != threads)
            fail(line, "barrier %d for %d threads, where others say %d", id, threads, named.expected);
        const u32 mine = 1u << current / WARP;
        if (named.warps & mine)
            fail(line, "arrives at barrier %d once more, where %d of %d threads are, and none has gone on since", id, named.arrived, threads);
        if (meeting == Meeting::aligned && named.line != 0 && named.line != line)
            fail(line, "waits at barrier %d by bar.sync, for which others wait in line %d", id, named.line);
        if (meeting == Meeting::aligned)
            named.line = line;
        named.warps |= mine;
        for (int i = 0; i < WARP; ++i)
            block->lanes[current / WARP * WARP + i].wait.value = named.generation;
        release(named.clock);
        if ((named.arrived += WARP) == threads) {
            ++named.generation;
            named.arrived = 0;
            named.line = 0;
            named.warps = 0;
            named.done.take(named.clock);
        }
    });
    if (meeting == Meeting::arrival)
        return;
    wait_for({Wait::named, id, lane_now().wait.value, nullptr, line});
    warp_now().clock.join(named.done);
}

// A phase of barrier.cluster ends when all threads have arrived that have not ended.
SIMT void settle(Cluster& cluster)
{
    int ended = 0;
    for (int rank = 0; rank < cluster_size; ++rank)
        ended += cluster.blocks[rank]->ended;
    if (cluster.arrived == 0 || cluster.arrived + ended < cluster_size * threads_of_block)
        return;
    ++cluster.generation;
    cluster.arrived = 0;
    cluster.done.take(cluster.clock);
}

SIMT void cluster_barrier(int line)
{
    Cluster& cluster = *block->cluster;
    together(NAMED, line, [&] {
        for (int i = 0; i < WARP; ++i)
            block->lanes[current / WARP * WARP + i].wait.value = cluster.generation;
        release(cluster.clock);
        cluster.arrived += WARP;
        settle(cluster);
    });
    wait_for({Wait::cluster, 0, lane_now().wait.value, nullptr, line});
    warp_now().clock.join(cluster.done);
}

SIMT void set_registers(int wanted, bool more, int line)
{
    together(REGISTERS, line, [&] {
        const int had = warp_now().registers;
        if (wanted < 24 || wanted > 256 || wanted % 8)
            fail(line, "setmaxnreg for %d registers: a multiple of 8 from 24 to 256", wanted);
        if (more ? wanted < had : wanted > had)
            fail(line, "setmaxnreg.%s to %d registers from %d", more ? "inc" : "dec", wanted, had);
        if (!more) {
            block->free_registers += (had - wanted) * WARP;
            warp_now().registers = wanted;
        }
        ++warp_now().set_registers;
    });
    if (!more)
        return;
    wait_for({Wait::registers, current / WARP, u32(wanted), nullptr, line});
    block->free_registers -= (wanted - warp_now().registers) * WARP;  // the first lane to go on takes them
    warp_now().registers = wanted;
}

SIMT void wait_for_memory(const volatile int* place, int value, int line)
{
    wait_for({Wait::memory, 0, u32(value), place, line});
}

}  // namespace simt
