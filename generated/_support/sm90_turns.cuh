// What kernels for sm_90a have besides whose warpgroups take turns.

#ifndef ATTNC_SHIM

// Counts for so many threads without waiting: who waits there goes on when all have come (PTX ISA, "bar").
__device__ __forceinline__ void warpgroups_arrive(int barrier, int threads)
{
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

#endif
