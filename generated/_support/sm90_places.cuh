// Places in memory for what blocks keep there while they run: as many as multiprocessors, each of which runs one block.

// Numbers before the first mark, of those that Python calls a counter.
constexpr int MARKS_AT = 8;

#ifndef ATTNC_SHIM

// The number of the multiprocessor that a block runs on. Numbers may have gaps, and a block may come to run elsewhere.
__device__ __forceinline__ int multiprocessor()
{
    int number;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
    return number;
}

#else
static inline int multiprocessor() { return blockIdx.x; }
#endif

// Marks a place as taken. Returns whether it already was: then it is another block's.
__device__ __forceinline__ int take_place(int* counter, int place) { return atomicExch(counter + MARKS_AT + place, 1); }

// Lets others have a place, whose numbers have all been read.
__device__ __forceinline__ void give_place(int* counter, int place)
{
    __threadfence();
    atomicExch(counter + MARKS_AT + place, 0);
}
