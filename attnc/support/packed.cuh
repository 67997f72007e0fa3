// Device functions of kernels of packed sequences.

// Clears rows `first` to `end` of a contiguous gradient, those behind the last sequence, which no kernel writes: all
// blocks of a launch together. A row has so many heads of so many columns.
template <class Value>
__device__ void clear_rows(Value* gradient, int first, int end, int heads, int columns)
{
    const long long row_size = (long long)heads * columns, size = end * row_size, step = (long long)gridDim.x * THREADS;
    for (long long i = first * row_size + blockIdx.x * THREADS + threadIdx.x; i < size; i += step)
        gradient[i] = Value{};
}
