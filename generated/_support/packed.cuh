// Device functions of kernels of packed sequences.

// Clears rows `first` to `end` of a contiguous gradient, those behind the last sequence, which no kernel writes: all
// blocks of a launch together. row_size: elements of all heads.
template <class Value>
__device__ void clear_rows(Value* gradient, int first, int end, int row_size)
{
    const long long size = (long long)end * row_size, step = (long long)gridDim.x * THREADS;
    for (long long i = (long long)first * row_size + blockIdx.x * THREADS + threadIdx.x; i < size; i += step)
        gradient[i] = Value{};
}
