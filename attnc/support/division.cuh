// Division by a size that may be negative or 0: included where a kernel divides so.

// Floor division; by 0 it gives 0.
template <class A, class B>
__device__ auto floor_div_by_any(A x, B size) -> decltype(x / size)
{
    return size == 0 ? 0 : floor_div(x, size);
}

// Its remainder, 0 for a size of 0. By -1 nothing is divided: the quotient of the least number of a type is beyond it.
template <class A, class B>
__device__ auto floor_mod_by_any(A x, B size) -> decltype(x / size)
{
    return size == 0 || size == -1 ? 0 : floor_mod(x, size);
}
