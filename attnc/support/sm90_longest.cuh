// Tiles of packed sequences in the order of their work.

#ifndef ATTNC_SHIM

// Of all lanes.
__device__ __forceinline__ int warp_sum(int x) { return __reduce_add_sync(0xffffffffu, x); }

#endif

// The number of a tile, as `find_sequence` takes it, by its rank: those that walk farthest come first. All lanes of a
// warp ask together.
//
// How far is counted in tiles of the sequence. SHRINKS: each walks one tile less than the one before it, as under a
// causal mask; else all walk along the whole sequence. Ranks behind the last tile have a number behind the last
// sequence.
template <bool SHRINKS, class Value>
__device__ __forceinline__ int find_longest(const Value* cu_seqlens, long long stride, int rank, int B, int size)
{
    const int lane = threadIdx.x % 32;
    auto first_of = [&](int b) { return (int)cu_seqlens[b * stride] / size + b; };
    auto tiles_of = [&](int b) {
        return b < B ? (int)(cu_seqlens[(b + 1) * stride] - cu_seqlens[b * stride] + size - 1) / size : 0;
    };
    auto count = [&](int length) {  // tiles that walk at least so far
        int found = 0;
        for (int b = lane; b < B; b += 32)
            found += max(SHRINKS ? tiles_of(b) - length + 1 : tiles_of(b) >= length ? tiles_of(b) : 0, 0);
        return warp_sum(found);
    };
    if (rank >= count(1))
        return first_of(B);
    int length = 1, most = (int)cu_seqlens[B * stride] / size + 1;
    while (length < most) {
        const int middle = (length + most + 1) / 2;
        if (count(middle) > rank)
            length = middle;
        else
            most = middle - 1;
    }
    // Of those that walk exactly so far, sequence after sequence.
    const int left = rank - count(length + 1), place = SHRINKS ? left : left / length;
    for (int b = lane, before = 0;; b += 32) {
        const bool has_one = SHRINKS ? tiles_of(b) >= length : tiles_of(b) == length;
        const u32 all = ballot(has_one);
        const bool is_mine = has_one && before + count_bits(all & ((1u << lane) - 1)) == place;
        const int found = is_mine ? first_of(b) + (SHRINKS ? tiles_of(b) - length : left % length) : 0;
        before += count_bits(all);
        if (before > place)
            return warp_max(found);
    }
}
