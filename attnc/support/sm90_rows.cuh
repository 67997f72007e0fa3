// Rows that no box of TMA holds: copies of 16 bytes to shared memory that lanes ask for (cp.async), beside sm90.cuh.
//
// They are made through the generic proxy, while wgmma reads shared memory through the asynchronous one (PTX ISA, "Async proxy"). So
// whoever multiplies what came so says fence.proxy.async between its wait for the mbarrier and the product.

#ifndef ATTNC_SHIM

// 16 bytes from global to shared memory; zeros, and nothing is read, if not `inside`.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// Arrives when all copies that this thread has asked for so far are there, as one of those that the barrier was initialised for (.noinc).
__device__ __forceinline__ void copies_arrive(u32 barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

#endif

// So many pieces of 64 columns.
template <int COUNT>
struct Pieces { static constexpr int value = COUNT; };
