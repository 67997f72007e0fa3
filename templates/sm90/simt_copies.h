// Copies between global and shared memory that the copy engine makes, at a moment of its choice; a part of sm90/simt.h.
#pragma once

namespace simt {

SIMT bool is_load(Kind kind) { return kind == Kind::load || kind == Kind::bulk_load || kind == Kind::word; }

SIMT u32 bytes_of(const Map& map)
{
    u32 bytes = map.element_bytes;
    for (u32 i = 0; i < map.rank; ++i)
        bytes *= map.box[i];
    return bytes;
}

// The 16 bytes that lie at `place` if rows of `span` bytes are swizzled: the number of a piece in its row is xored with bits
// of the row's number, all taken from the address.
SIMT u32 swizzled(u32 place, u32 span) { return place ^ ((place >> 7) & (span / 16 - (span > 0))) << 4; }

// Calls f(shared, global or null, bytes) for each piece of at most 16 bytes of the box.
template <class F>
static void for_pieces(const Copy& copy, F f)
{
    const Map& map = copy.map;
    const int row_bytes = int(map.box[0] * map.element_bytes), rows = int(copy.bytes) / row_bytes;
    for (int row = 0; row < rows; ++row) {
        const unsigned char* from = (const unsigned char*)map.base;
        bool inside = true;
        int rest = row;
        for (u32 i = 1; i < map.rank; ++i) {
            const int64_t x = copy.at[i] + rest % int(map.box[i]);
            rest /= int(map.box[i]);
            inside &= x >= 0 && x < int64_t(map.sizes[i]);
            from += x * int64_t(map.strides[i - 1]);
        }
        for (int byte = 0; byte < row_bytes; byte += UNIT) {
            const u32 place = swizzled(copy.place + u32(row * row_bytes + byte), map.swizzle);
            for (int part = 0; part < UNIT; part += int(map.element_bytes)) {
                const int64_t x = copy.at[0] + (byte + part) / int(map.element_bytes);
                const bool there = inside && x >= 0 && x < int64_t(map.sizes[0]);
                f(place + part, there ? (unsigned char*)from + x * map.element_bytes : nullptr, int(map.element_bytes));
            }
        }
    }
}

SIMT unsigned char* memory_at(u32 place) { return (there == block ? shared : there->memory) + (place - BASE); }

// What a store writes.
SIMT unsigned char* source(const Copy& copy, u32 place)
{
    return copy.kept ? copy.kept + (place - copy.place) : memory_at(place);
}

// The transfer itself.
SIMT void make(Copy& copy)
{
    copy.made = true;
    idle = 0;
    const u32 bytes = copy.bytes;
    switch (copy.kind) {
    case Kind::load:
        for_pieces(copy, [](u32 place, const unsigned char* global, int size) {
            if (global)
                memcpy(memory_at(place), global, size);
            else
                memset(memory_at(place), 0, size);
        });
        break;
    case Kind::store:
        for_pieces(copy, [&](u32 place, unsigned char* global, int size) {
            if (global)
                memcpy(global, source(copy, place), size);
        });
        break;
    case Kind::bulk_load: memcpy(memory_at(copy.place), copy.global, bytes); break;
    case Kind::word: memcpy(memory_at(copy.place), &copy.word, bytes); break;
    case Kind::bulk_store: memcpy(copy.global, source(copy, copy.place), bytes); break;
    case Kind::bulk_add:
        for (u32 i = 0; i < bytes / 4; ++i)
            ((float*)copy.global)[i] += ((const float*)source(copy, copy.place))[i];
    }
    if (!is_load(copy.kind)) {
        free(copy.kept);
        copy.kept = nullptr;
        return;
    }
    copy.live = false;
    Barrier& barrier = there->barriers[copy.barrier];
    --barrier.copies;
    barrier.bytes -= bytes;
    if (barrier.bytes <= -(1 << 20))
        fail(0, "an mbarrier counts less than 1 MB");
    settle(barrier, 0);
}

// Makes one of the copies of TMA under way, any one of them. Returns false if there is none.
SIMT bool copy_by_tma()
{
    int under_way[COPIES], count = 0;
    for (int i = 0; i < block->copy_count; ++i)
        if (block->copies[i].live && !block->copies[i].made)
            under_way[count++] = i;
    if (count == 0)
        return false;
    make(block->copies[under_way[random_word() % count]]);
    return true;
}

SIMT Copy& new_copy(Kind kind, int line)
{
    int i = 0;
    while (i < there->copy_count && there->copies[i].live)
        ++i;
    if (i == COPIES)
        fail(line, "more than %d copies under way", COPIES);
    if (i == there->copy_count)
        ++there->copy_count;
    Copy& copy = there->copies[i];
    memset(&copy, 0, sizeof copy);
    copy.live = true;
    copy.kind = kind;
    copy.thread = current;
    return copy;
}

SIMT void begin_load(Copy& copy, u32 bar, int line)
{
    Barrier& barrier = barrier_at(bar, line);
    if (!barrier.visible)
        fail(line, "an mbarrier for a copy, without fence.mbarrier_init or fence.proxy.async after its initialisation");
    copy.barrier = number_of(barrier);
    copy.phase = barrier.phase;
    ++barrier.copies;
    const bool is_word = copy.kind == Kind::word;
    at(copy.place, copy.bytes, is_word ? copy.bytes : 16, line, "a copy");
    for (int i = 0; i < there->barrier_count; ++i)
        if (const u32 p = there->barriers[i].place; p + 8 > copy.place && p < copy.place + copy.bytes)
            fail(line, "a copy overwrites the mbarrier at shared + %u", p - BASE);
    for (u32 p = copy.place / UNIT * UNIT; p < copy.place + copy.bytes; p += UNIT) {
        Unit& one = unit(p);
        check_readers(one, p, line, "a copy");
        if (is_word && one.reader && known_there().ticks[one.reader - 1] < one.read_tick)
            fail(line, "a word of another block overwrites shared + %u, which warp %d may still read", p - BASE, one.reader - 1);
        for (int warp = 0; warp < threads_of_block / WARP && !is_word; ++warp)
            if (one.reads[warp] > known_there().reads[warp])
                fail(line, "a copy overwrites shared + %u, which threads of warp %d have read without a fence.proxy.async and a"
                     " __syncwarp since", p - BASE, warp);
        if (one.writer && (there != block || (one.writer - 1) / WARP != current / WARP)
            && known_there().ticks[(one.writer - 1) / WARP] < one.tick)
            fail(line, "a copy overwrites shared + %u, which warp %d writes too", p - BASE, (one.writer - 1) / WARP);
        one.writer = one.copier = 0;
        one.barrier = copy.barrier + 1;
        one.phase = copy.phase;
    }
    memset(memory_at(copy.place), 0xff, copy.bytes);  // until the barrier says so, anything may be there
    if (chance(4))
        make(copy);
}

SIMT void begin_store(Copy& copy, int line)
{
    at(copy.place, copy.bytes, 16, line, "a store's source");
    copy.group = lane_now().groups + 1;
    copy.number = ++warp_now().stores;
    for (u32 p = copy.place / UNIT * UNIT; p < copy.place + copy.bytes; p += UNIT) {
        Unit& one = unit(p);
        check_async_read(one, p, line, "an asynchronous store");
        one.bulk_warp = current / WARP + 1;
        one.bulk = copy.number;
    }
    if (chance(4))
        make(copy);
}

SIMT Map checked(const Map* map, u32 place, int rank, int line)
{
    if (map->rank != u32(rank))
        fail(line, "%d coordinates for a tensor map of %u", rank, map->rank);
    const u32 row = map->box[0] * map->element_bytes;
    if (map->swizzle && row != map->swizzle)
        fail(line, "rows of %u bytes in a box with a swizzle of %u", row, map->swizzle);
    if (place % 128)
        fail(line, "a box at shared + %d, which is not a multiple of 128", int(place) - int(BASE));
    return *map;
}

SIMT void copy_box(Kind kind, u32 place, const void* map, u32 bar, int line, const int* coordinates, int rank)
{
    Copy& copy = new_copy(kind, line);
    copy.map = checked((const Map*)map, place, rank, line);
    memcpy(copy.at, coordinates, rank * sizeof(int));
    copy.place = place;
    copy.bytes = bytes_of(copy.map);
    if (kind == Kind::load)
        begin_load(copy, bar, line);
    else
        begin_store(copy, line);
}

// The same box to every block of the cluster.
void multicast(u32 place, const void* map, u32 bar, int line, const int* coordinates, int rank)
{
    for (int to = 0; to < cluster_size; ++to)
        in_block(to, line, [&] { copy_box(Kind::load, place, map, bar, line, coordinates, rank); });
}

void commit_stores() { ++lane_now().groups; }

// st.async: a word to another block, which counts on a barrier there. What is known by it is what this warp has done itself, and that
// it has heard what it waited for at its own barrier of that place.
SIMT void tell(u32 place, u32 bar, int rank, int word, int line)
{
    const int own = number_of(barrier_at(bar, line));
    in_block(rank, line, [&] {
        Copy& copy = new_copy(Kind::word, line);
        copy.place = place;
        copy.word = word;
        copy.bytes = sizeof word;
        Known &known = known_here(), &told = barrier_at(bar, line).clock.of[block->rank];
        told.ticks[current / WARP] = known.ticks[current / WARP] = warp_now().tick++;
        told.phases[own] = known.phases[own];
        begin_load(copy, bar, line);
    });
}

SIMT void bulk_copy(Kind kind, u32 place, void* global, u32 bytes, u32 bar, int line)
{
    if (bytes % 16 || (uintptr_t)global % 16)
        fail(line, "a bulk copy of %u bytes at address %p: both are multiples of 16", bytes, global);
    Copy& copy = new_copy(kind, line);
    copy.place = place;
    copy.global = global;
    copy.bytes = bytes;
    if (kind == Kind::bulk_load)
        begin_load(copy, bar, line);
    else
        begin_store(copy, line);
}

// Waits until at most `groups` of this thread's newest groups of stores are under way, or, with `read`, have not read all that they
// write: when that is there for others is open then.
SIMT void wait_stores(u32 groups, bool read, int line)
{
    Warp& warp = warp_now();
    const u32 committed = lane_now().groups;
    u32 oldest = warp.stores + 1;
    for (int i = 0; i < block->copy_count; ++i) {
        Copy& copy = block->copies[i];
        if (!copy.live || is_load(copy.kind) || copy.thread / WARP != current / WARP)
            continue;
        if (copy.thread == current && copy.group + groups <= committed) {
            if (read && !copy.made && !copy.read && chance(2)) {
                copy.kept = (unsigned char*)malloc(copy.bytes);
                memcpy(copy.kept, memory_at(copy.place), copy.bytes);
                copy.read = true;
            }
            if (read && copy.read)
                continue;
            if (!copy.made)
                make(copy);
            copy.live = false;
        } else if (copy.read)
            continue;
        else if (copy.number < oldest)
            oldest = copy.number;
    }
    known_here().bulks[current / WARP] = oldest - 1;
    (void)line;
}

// Ends of a thread and of a block.
SIMT void check_stores()
{
    for (int i = 0; i < block->copy_count; ++i)
        if (Copy& copy = block->copies[i]; copy.live && copy.read && copy.thread == current) {
            if (!copy.made)
                make(copy);
            copy.live = false;
        } else if (copy.live && !is_load(copy.kind) && copy.thread == current)
            fail(0, "the thread ends while a store of its is under way%s",
                 copy.group > lane_now().groups ? " (and not committed)" : "");
}

SIMT void check_copies()
{
    if (block->copying_count > 0) {
        message[0] = 0;
        say("block %u: copies of thread %d are left without a wait", block->index.x, block->copying[0]);
        _longjmp(escape, 1);
    }
    for (int i = 0; i < block->copy_count; ++i)
        if (const Copy& copy = block->copies[i]; copy.live) {
            message[0] = 0;
            say("block %u: a copy to shared + %u is left without a wait", block->index.x, copy.place - BASE);
            _longjmp(escape, 1);
        }
}

// What copies, and other blocks, do to this one's shared memory must be known to be done where it ends.
SIMT void check_arrivals()
{
    static Clock all;
    memset(&all, 0, sizeof all);
    for (int warp = 0; warp < threads_of_block / WARP; ++warp)
        all.join(block->warps[warp].clock);
    message[0] = 0;
    for (int rank = 0; rank < cluster_size; ++rank)
        for (int warp = 0; warp < threads_of_block / WARP; ++warp)
            if (block->touched[rank][warp] > all.of[rank].ticks[warp] && !message[0])
                say("block %u: ends where warp %d of block %u may still arrive at one of its mbarriers", block->index.x, warp,
                    block->cluster->blocks[rank]->index.x);
    for (u32 i = 0; i < u32(used_bytes) / UNIT && !message[0]; ++i)
        if (const Unit& one = block->units[i]; one.barrier > 0 && all.of[block->rank].phases[one.barrier - 1] <= one.phase)
            say("block %u: ends where a copy to shared + %u may still arrive", block->index.x, i * UNIT);
    if (message[0])
        _longjmp(escape, 1);
}

// cp.async: 16 bytes each, through the generic proxy, there at a moment between their issue and what the arrival behind them tells of. A
// thread's land in their order, which nothing can observe: a read before the wait for the arrival is a fault in any case.

SIMT void land(Lane& lane, u32 end)
{
    for (; lane.first_chunk != end; ++lane.first_chunk) {
        const auto& chunk = lane.chunks[lane.first_chunk % CHUNKS];
        memset(memory_at(chunk.place), 0, UNIT);
        memcpy(memory_at(chunk.place), chunk.from, chunk.bytes);
    }
}

// So many bytes, by instructions that each copy `aligned` of them; then zeros.
SIMT void copy_async(u32 place, const void* from, u32 bytes, u32 aligned, int line)
{
    Lane& me = lane_now();
    at(place, UNIT, UNIT, line, "a copy");
    if (bytes > 0 && (uintptr_t)from % aligned)
        fail(line, "a copy from an address that is not a multiple of %u", aligned);
    if (me.last_chunk - me.first_chunk == CHUNKS || me.last_chunk - me.told_chunk == CHUNKS)
        fail(line, "more than %d copies of a thread under way", CHUNKS);
    for (int i = 0; i < block->barrier_count; ++i)
        if (const u32 p = block->barriers[i].place; p / UNIT == place / UNIT)
            fail(line, "a copy overwrites the mbarrier at shared + %u", p - BASE);
    Unit& one = unit(place);
    check_readers(one, place, line, "a copy");
    if (one.writer && (one.writer - 1) / WARP != current / WARP && known_here().ticks[(one.writer - 1) / WARP] < one.tick)
        fail(line, "a copy overwrites shared + %u, which warp %d writes too", place - BASE, (one.writer - 1) / WARP);
    one.writer = 0;
    one.barrier = UNTOLD;
    one.copier = current + 1;
    memset(memory_at(place), 0xff, UNIT);
    me.chunks[me.last_chunk++ % CHUNKS] = {place, bytes, from};
    if (chance(64))
        land(me, me.last_chunk);
}

// The oldest arrival of a thread, with all that it tells of.
SIMT void arrive_behind_copies(int which)
{
    const int thread = block->copying[which];
    Lane& lane = block->lanes[thread];
    const auto arrival = lane.arrivals[lane.first_arrival++ % ARRIVALS];
    if (lane.first_arrival == lane.last_arrival)
        block->copying[which] = block->copying[--block->copying_count];
    if (int(arrival.chunk - lane.first_chunk) > 0)
        land(lane, arrival.chunk);
    idle = 0;
    Barrier& barrier = block->barriers[arrival.barrier];
    if (barrier.pending == 0 || barrier.phase != arrival.phase)
        fail(0, "more than %u arrivals in phase %u of the mbarrier at shared + %u", barrier.count, barrier.phase, barrier.place - BASE);
    --barrier.copies;
    --barrier.pending;
    settle(barrier, 0);
}

// cp.async.mbarrier.arrive.noinc: tells of all copies of this thread so far, and of no ordinary write of its.
SIMT void copies_arrive(u32 bar, int line)
{
    Lane& me = lane_now();
    Barrier& barrier = barrier_at(bar, line);
    if (me.last_arrival - me.first_arrival == ARRIVALS)
        fail(line, "more than %d arrivals of a thread under way", ARRIVALS);
    for (u32 i = me.told_chunk; i != me.last_chunk; ++i) {
        Unit& one = unit(me.chunks[i % CHUNKS].place);
        if (one.barrier == UNTOLD && one.copier == current + 1) {
            one.barrier = number_of(barrier) + 1;
            one.phase = barrier.phase;
        }
    }
    me.told_chunk = me.last_chunk;
    barrier.clock.join(warp_now().clock);  // what was waited for before they were issued has happened; no release of what was done since
    ++barrier.copies;
    if (me.first_arrival == me.last_arrival)
        block->copying[block->copying_count++] = current;
    me.arrivals[me.last_arrival++ % ARRIVALS] = {me.last_chunk, barrier.phase, number_of(barrier)};
    if (chance(16))
        while (me.first_arrival != me.last_arrival) {
            int place = 0;
            while (block->copying[place] != current)
                ++place;
            arrive_behind_copies(place);
        }
}

// cp.async.wait_all: what no arrival tells of has landed, and is as what this thread writes.
SIMT void wait_copies(int line)
{
    Lane& me = lane_now();
    land(me, me.last_chunk);
    for (; me.told_chunk != me.last_chunk; ++me.told_chunk) {
        const u32 place = me.chunks[me.told_chunk % CHUNKS].place;
        if (Unit& one = unit(place); one.barrier == UNTOLD && one.copier == current + 1) {
            one.barrier = one.copier = 0;
            wrote(place, UNIT, line);
        }
    }
}

// Makes one of the copies under way, or what threads of a warp wait for, any one of them. Returns false if there is none.
SIMT bool copy_something()
{
    if (block->copying_count == 0 || (block->copy_count > 0 && chance(2)))
        if (copy_by_tma())
            return true;
    if (block->copying_count == 0)
        return false;
    const int which = int(random_word() % block->copying_count), warp = block->copying[which] / WARP;
    if (chance(2)) {
        arrive_behind_copies(which);
        return true;
    }
    for (int i = block->copying_count - 1; i >= 0; --i)
        if (i < block->copying_count && block->copying[i] / WARP == warp)
            arrive_behind_copies(i);
    return true;
}

SIMT void check_chunks()
{
    if (const Lane& me = lane_now(); me.told_chunk != me.last_chunk)
        fail(0, "the thread ends while a copy of its is under way, of which no mbarrier tells");
}

}  // namespace simt
