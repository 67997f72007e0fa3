// Device functions of kernels that ask for rows before they load them.

#ifndef ATTNC_SHIM

// Asks for the line of the L2 cache that an address lies in (PTX ISA, "prefetch").
__device__ __forceinline__ void prefetch_line(const void* at)
{
    asm volatile("prefetch.global.L2 [%0];" :: "l"(at));
}

#endif
