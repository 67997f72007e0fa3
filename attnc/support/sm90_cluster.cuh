// Device functions of kernels whose blocks share tiles in clusters. They define CLUSTER, the blocks of one: 1 or 2.
//
// The blocks of a cluster have the same layout of shared memory, so a place is an address in this block and the rank of
// a block.
//
// What one block may know of the other, by the PTX ISA:
// - barrier.cluster: arrive releases and wait acquires at cluster scope, so both see initialised barriers.
// - A multicast copy writes the shared memory of each block and completes on the barrier of each, with release at
//   cluster scope. A wait at the block's own barrier covers all bytes that were announced there.
// - Arrivals at EMPTY barriers release at block scope, the default of mbarrier.arrive. What copies of the other block
//   must follow are reads by wgmma and by bulk stores, and writes that these read; waits have completed them all
//   (wgmma.wait_group, cp.async.bulk.wait_group.read). Release at cluster scope would wait for all memory accesses of
//   the thread (MEMBAR.GPU), in every tile of keys.
// - st.async completes on a barrier like a copy; the reader of the word waits with acquire at cluster scope.
#ifndef ATTNC_SHIM

// The rank of this block in its cluster.
__device__ __forceinline__ int block_rank()
{
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return (int)rank;
}

// All threads of all blocks. The instructions are for whole warps, so lanes of a warp join first.
__device__ __forceinline__ void cluster_sync()
{
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// At the barrier of this block, then at that of the other: when the other sees the arrival, this block has it, too.
__device__ __forceinline__ void cluster_arrive_if(u32 barrier, bool arrives)
{
    mbarrier_arrive_if(barrier, arrives);
    if constexpr (CLUSTER > 1)
        asm volatile("{ .reg .pred p; .reg .b32 place; setp.ne.b32 p, %2, 0;\n"
                     "mapa.shared::cluster.u32 place, %0, %1;\n"
                     "@p mbarrier.arrive.shared::cluster.b64 _, [place]; }"
                     :: "r"(barrier), "r"(1 - block_rank()), "r"((int)arrives) : "memory");
}

// A box to the same place in all blocks of the cluster. Its bytes count on the barrier of each.
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap& map, u32 barrier, int column, int row,
    int head, int batch)
{
    if constexpr (CLUSTER == 1)
        tma_load(to, map, barrier, column, row, head, batch);
    else
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile"
                     ".mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, { %3, %4, %5, %6 }], [%2], %7;"
                     :: "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch),
                        "h"((unsigned short)((1 << CLUSTER) - 1)) : "memory");
}

// Writes a word to the shared memory of a block. Its 4 bytes count on the barrier there.
__device__ __forceinline__ void cluster_send(u32 place, u32 barrier, int rank, int word)
{
    asm volatile("{ .reg .b32 place, barrier;\n"
                 "mapa.shared::cluster.u32 place, %0, %2;\n"
                 "mapa.shared::cluster.u32 barrier, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [place], %3, [barrier]; }"
                 :: "r"(place), "r"(barrier), "r"(rank), "r"(word) : "memory");
}

// As mbarrier_wait, for a word of cluster_send.
__device__ __forceinline__ void cluster_wait(u32 barrier, u32 parity)
{
    asm volatile("{ .reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra.uni done;\n"
                 "bra.uni again;\n"
                 "done: }" :: "r"(barrier), "r"(parity) : "memory");
}

#endif
