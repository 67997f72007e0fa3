// What a warp that converts rows by way of registers asks the L2 cache for, a tile before it loads it.

// Asks for this lane's row of so many bytes, which begins anywhere in a line: each of the four lanes that share the row
// asks for every fourth line. A warp has half of a tile under way, and memory takes longer than that.
template <int BYTES>
__device__ __forceinline__ void ask_for_row(const unsigned char* row)
{
    if (row == nullptr)
        return;
#pragma unroll
    for (int line = 0; line < (BYTES + 127) / 128 + 1; line += 4)
        if (const int at = (line + (int)read_lane() % 4) * 128; at < BYTES + 128)
            prefetch_line(row + min(at, BYTES - 1));
}
