// Device functions of kernels whose consumers have a program each.

#ifndef ATTNC_SHIM

// Named barrier of this many threads, whole warps, which come to it from different places of the program. bar.sync is
// aligned: it promises that all execute the same instruction (PTX ISA, "barrier").
__device__ __forceinline__ void named_barrier_meet(int barrier, int threads)
{
    asm volatile("barrier.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

#endif
