// What kernels for sm_90a have besides whose blocks share tiles in clusters. CLUSTER, which they define: the blocks of one, 1 or 2.
//
// The blocks of a cluster run the same text, so what lies in the shared memory of one lies at the same place in that of the other: a
// place is named by its address in this block, and by the rank of the block that is meant.
//
// What one block may know of the other rests on four rules of the PTX ISA:
// - barrier.cluster: arrive releases and wait acquires, for the cluster. Barriers are there for both, and so is shared memory.
// - A copy to several blocks writes the shared memory of each and completes on the barrier of each, with release for the cluster. Who
//   waits at its own barrier, as for copies of its own block, finds all bytes that it has announced there.
// - Arrivals where tiles have been read release for their own block, as mbarrier.arrive does unless told otherwise. What the copies of the
//   other block must come behind are reads of tensor cores and of bulk stores, and the zeros and rows of o that were written to be read by
//   these; waits have completed them all (wgmma.wait_group, cp.async.bulk.wait_group.read). Release for the cluster would wait for all
//   memory accesses of the thread (MEMBAR.GPU), in every tile of keys.
// - st.async completes on a barrier like a copy; who reads the word waits with acquire for the cluster.
#ifndef ATTNC_SHIM

// Which block of its cluster this one is.
__device__ __forceinline__ int block_rank()
{
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return (int)rank;
}

// All threads of all blocks. Lanes of a warp may come one by one, but these instructions are for whole warps.
__device__ __forceinline__ void cluster_meet()
{
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// At the barrier of this block, and then at that of the other, which so has no arrival less than this one when it sees this one's.
__device__ __forceinline__ void cluster_arrive_if(u32 barrier, bool arrives)
{
    mbarrier_arrive_if(barrier, arrives);
    if constexpr (CLUSTER > 1)
        asm volatile("{ .reg .pred p; .reg .b32 place; setp.ne.b32 p, %2, 0;\n"
                     "mapa.shared::cluster.u32 place, %0, %1;\n"
                     "@p mbarrier.arrive.shared::cluster.b64 _, [place]; }"
                     :: "r"(barrier), "r"(1 - block_rank()), "r"((int)arrives) : "memory");
}

// A box to the same place in all blocks of the cluster; its bytes count on the barrier of each.
__device__ __forceinline__ void cluster_load(u32 to, const TensorMap& map, u32 barrier, int column, int row, int head, int batch)
{
    if constexpr (CLUSTER == 1)
        tma_load(to, map, barrier, column, row, head, batch);
    else
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, { %3, %4, %5, %6 }], [%2], %7;"
                     :: "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch),
                        "h"((unsigned short)((1 << CLUSTER) - 1)) : "memory");
}

// Writes a word to the shared memory of a block; its 4 bytes count on the barrier there.
__device__ __forceinline__ void cluster_tell(u32 place, u32 barrier, int rank, int word)
{
    asm volatile("{ .reg .b32 place, barrier;\n"
                 "mapa.shared::cluster.u32 place, %0, %2;\n"
                 "mapa.shared::cluster.u32 barrier, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [place], %3, [barrier]; }"
                 :: "r"(place), "r"(barrier), "r"(rank), "r"(word) : "memory");
}

// As mbarrier_wait, for what cluster_tell has written.
__device__ __forceinline__ void cluster_wait(u32 barrier, u32 parity)
{
    asm volatile("{ .reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra.uni done;\n"
                 "bra.uni again;\n"
                 "done: }" :: "r"(barrier), "r"(parity) : "memory");
}

#endif
