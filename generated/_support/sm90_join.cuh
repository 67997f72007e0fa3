// Columns of keys that are of another input, in 16 bits, and lie behind those of K in a tile.

// Copies this lane's 16 columns, from `first` on, of its row (`gathered_row`, `gathered_column`) to a panel, of whose
// tile these are eight rows. Columns lie `stride` apart; those from `columns` on become zeros, without a read. WHOLE:
// rows lie together and at multiples of 16 bytes, and come by cp.async.
template <bool WHOLE>
__device__ __forceinline__ void copy_columns(u32 rows, const element* from, long long stride, int first, int columns)
{
    const int row = gathered_row(), own = gathered_column();
    const u32 place = rows + row * 128 + (own / 8 ^ row) * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int column = first + own + 8 * i;
        if constexpr (WHOLE) {
            copy_async(place ^ 16 * i, from + column, column < columns);
        } else {
#pragma unroll 1
            for (int j = 0; j < 8; j += 2) {
                u32 pair = 0;
                if (column < columns) {
                    const element* const at = from + (column + j) * stride;
                    pair = at[0].bits | (u32)at[stride].bits << 16;
                }
                store_shared((place ^ 16 * i) + 2 * j, pair);
            }
        }
    }
}
