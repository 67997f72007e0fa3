// Copies of rows that are no TMA box: 16 bytes a lane to shared memory, by cp.async.
//
// They use the generic proxy, and wgmma reads shared memory through the async proxy (PTX ISA, "Async proxy"). So a
// consumer needs fence.proxy.async between the wait for the mbarrier and wgmma.

#ifndef ATTNC_SHIM

// Copies 16 bytes from global to shared memory; zeros, without a read, if not `inside`.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// Arrives when all earlier copies of this thread are there, as one of the arrivals that the barrier expects (.noinc).
__device__ __forceinline__ void copies_arrive(u32 barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

#endif

// A number of panels of 64 columns.
template <int COUNT>
struct Panels { static constexpr int value = COUNT; };
