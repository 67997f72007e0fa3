// What a kernel sees of the Hopper GPU that it runs on, and calls of it; a part of sm90/simt.h.
//
// The machine is a library of its own (`attnc.verify.simt`), compiled once and with optimisation, whatever a kernel is compiled with.
#pragma once

#include "../cuda/simt_words.h"

SIMT_STATE Dim threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

typedef uint32_t u32;
typedef uint64_t u64;
constexpr int WARP = 32, MOST_SHARED = 232448;
constexpr u32 BASE = 1024;  // of dynamic shared memory in its window: what lies before it is the system's

SIMT_STATE int current, threads_of_block;  // thread
SIMT_STATE int cluster_size;               // blocks of a cluster

enum class Kind { load, store, bulk_load, bulk_store, bulk_add, word };

}  // namespace simt

SIMT_STATE unsigned char shared[simt::MOST_SHARED + 1024] __attribute__((aligned(1024)));  // more than a block can have, to see what it writes past its own

namespace simt {

// Instructions that a warp executes together.
enum { SHUFFLE = 1, VOTE, SYNC, NAMED, MATRIX, FENCE, COMMIT, RETIRE, MULTIPLY, REGISTERS, ELECT };

[[noreturn]] SIMT void fail(int line, const char* format, ...);
SIMT void give_turn();
SIMT bool together(int kind, int line);
SIMT u32 shuffle(u32 x, int lane, int line);
SIMT u32 ballot(bool x, int line);
SIMT void store_matrices(u32 row, const u32 (&x)[4], bool transposed, int line);
SIMT void load_matrices(u32 (&x)[4], u32 row, bool transposed, int line);
SIMT const char* launch(
    void (*kernel)(), int grid_size, int threads, int bytes, uint64_t seed, char* memory, int resident, int cluster = 1);

SIMT unsigned char* at(u32 place, u32 bytes, u32 aligned, int line, const char* what);
SIMT void wrote(u32 place, u32 bytes, int line);
SIMT void check_read(u32 place, u32 bytes, int line);
SIMT void fence_proxy();
SIMT void barrier_init(u32 place, u32 count, int line);
SIMT void barrier_arrive(u32 place, u32 bytes, int line);
SIMT bool barrier_passed(u32 place, u32 parity, int line);
SIMT void barrier_wait(u32 place, u32 parity, int line);
// How a warp comes to a named barrier: an aligned one is waited for by the same instruction in all warps.
enum class Meeting { aligned, anywhere, arrival };
SIMT void named_barrier(int id, int threads, Meeting meeting, int line);
SIMT int block_rank();
SIMT void cluster_barrier(int line);
SIMT void cluster_arrive(u32 place, int line);
SIMT void set_registers(int wanted, bool more, int line);
SIMT void wait_for_memory(const volatile int* place, int value, int line);

SIMT void copy_box(Kind kind, u32 place, const void* map, u32 bar, int line, const int* coordinates, int rank);
SIMT void bulk_copy(Kind kind, u32 place, void* global, u32 bytes, u32 bar, int line);
SIMT void wait_stores(u32 groups, bool read, int line);
SIMT void copy_async(u32 place, const void* from, u32 bytes, u32 aligned, int line);
SIMT void copies_arrive(u32 bar, int line);
SIMT void wait_copies(int line);
SIMT void tell(u32 place, u32 bar, int rank, int word, int line);
SIMT void multicast(u32 place, const void* map, u32 bar, int line, const int* coordinates, int rank);
SIMT void commit_stores();

// What the name of a wgmma says: its columns, whether a comes from registers, which operands are transposed, the type.
struct Form { int n; bool from_registers, transposed_a, transposed_b, is_f16; };

SIMT void multiply(Form form, float* sum, const u32* a, u64 left, u64 right, bool accumulate, int line);
SIMT void wgmma_fence(int line);
SIMT void wgmma_commit(int line);
SIMT void wgmma_wait(u32 groups, int line);
SIMT void multiply_fragments(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bool is_f16, int line);  // of mma.sync

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
