// What a kernel calls of the Hopper GPU that it runs on; a part of sm90/simt.h.
//
// Behind the declarations are texts that have to be compiled with a kernel, as what they do is part of it.
#pragma once

#include "simt_state.h"

namespace simt {

// Instructions that a warp executes together.
enum { SHUFFLE = 1, VOTE, SYNC, NAMED, MATRIX, FENCE, COMMIT, RETIRE, MULTIPLY, REGISTERS, ELECT };

[[noreturn]] SIMT void fail(int line, const char* format, ...);
SIMT Lane& lane_now();
SIMT void give_turn();
SIMT bool is_last(int kind, int line);
SIMT void go_on();
SIMT bool together(int kind, int line);
SIMT const char* launch(
    void (*kernel)(), int grid_size, int threads, int bytes, uint64_t seed, char* memory, int resident, int cluster = 1);

SIMT unsigned char* at(u32 place, u32 bytes, u32 aligned, int line, const char* what);
SIMT void wrote(u32 place, u32 bytes, int line);
SIMT void check_read(u32 place, u32 bytes, int line);
SIMT void fence_proxy();
SIMT void barrier_init(u32 place, u32 count, int line);
SIMT void barrier_arrive(u32 place, u32 bytes, int line);
SIMT void remote_arrive(u32 place, int rank, int line);
SIMT bool barrier_passed(u32 place, u32 parity, int line);
SIMT void barrier_wait(u32 place, u32 parity, int line);
// How a warp comes to a named barrier: an aligned one is waited for by the same instruction in all warps.
enum class Meeting { aligned, anywhere, arrival };
SIMT void named_barrier(int id, int threads, Meeting meeting, int line);
SIMT void cluster_barrier(int line);
SIMT void set_registers(int wanted, bool more, int line);
SIMT void wait_for_memory(const volatile int* place, int value, int line);

SIMT void copy_box(Kind kind, u32 place, const void* map, u32 bar, int line, const int* coordinates, int rank);
SIMT void bulk_copy(Kind kind, u32 place, void* global, u32 bytes, u32 bar, int line);
SIMT void wait_stores(u32 groups, bool read, int line);
SIMT void copy_async(u32 place, const void* from, u32 bytes, u32 aligned, int line);
SIMT void copies_arrive(u32 bar, int line);
SIMT void wait_copies(int line);
SIMT void tell(u32 place, u32 bar, int rank, int word, int line);

// What the name of a wgmma says: its columns, whether a comes from registers, which operands are transposed, the type.
struct Form { int n; bool from_registers, transposed_a, transposed_b, is_f16; };

SIMT void multiply(Form form, float* sum, const u32* a, u64 left, u64 right, bool accumulate, int line);
SIMT void wgmma_fence(int line);
SIMT void wgmma_commit(int line);
SIMT void wgmma_wait(u32 groups, int line);
SIMT void multiply_fragments(float (&c)[4], const Show* all, bool is_f16);  // of mma.sync

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

template <class... At>
static void tensor_copy(Kind kind, u32 place, const void* map, u32 bar, int line, At... at)
{
    const int coordinates[] = {at...};
    copy_box(kind, place, map, bar, line, coordinates, sizeof...(at));
}

template <int N, bool FROM_REGISTERS, bool TA, bool TB, bool F16>
static void wgmma(float* sum, const u32* a, u64 left, u64 right, bool accumulate, int line)
{
    static_assert(N % 8 == 0 && 8 <= N && N <= 256, "wgmma has N = 8, 16, ..., 256");
    multiply({N, FROM_REGISTERS, TA, TB, F16}, sum, a, left, right, accumulate, line);
}

}  // namespace simt
