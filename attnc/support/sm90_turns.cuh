// Device functions of kernels whose consumers take turns.

#ifndef ATTNC_SHIM

// Arrives at a named barrier of this many threads, without waiting (PTX ISA, "bar").
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads)
{
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

#endif
