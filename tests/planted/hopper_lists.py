"""Bugs planted in how Hopper's kernels walk over the blocks that lists name, and in the bits that are made of
the lists first.
"""

from __future__ import annotations

from tests.planted.bug import HopperBug, Place

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="the first block of a word never seen",
        attention="hopper_lists",
        story="bits below a place were those of a shift by one less",
        anchor="u32 named = (u32)row[word] & 0xffffffffu >> (31 - block % 32);",
        patch="u32 named = (u32)row[word] & 0xffffffffu >> (31 - block % 32) & ~1u;",
    ),
    HopperBug(
        name="one tile of a block",
        attention="hopper_lists",
        story="a walk went from block to block, whatever tiles a block has",
        anchor="return found == block ? at : (found + 1) * LISTED_BLOCK - LISTED_TILE;",
        patch="return found * LISTED_BLOCK;",
    ),
    HopperBug(
        name="the word before not looked at",
        attention="hopper_lists",
        story="a list was thought to have 32 blocks",
        anchor="if (--word < 0) return -LISTED_TILE;",
        patch="return -LISTED_TILE;",
    ),
    HopperBug(
        name="queries without a list have the last one",
        attention="hopper_lists",
        story="a negative number of a list was thought not to occur",
        anchor="if (line < 0 || at < 0)",
        patch="if (at < 0)",
        also=(
            Place(
                anchor="const int* const row = bits + (long long)line * words;",
                patch="const int* const row = bits + (long long)max(line, 0) * words;",
            ),
        ),
    ),
    HopperBug(
        name="bits of the call before",
        attention="hopper_lists",
        story="memory of a call was thought to be zeros",
        anchor="bits[word] = 0;",
        patch="",
    ),
    HopperBug(
        name="bits set before others are cleared",
        attention="hopper_lists",
        story="threads that set bits did not wait for those that clear them",
        anchor="bits[word] = 0; __syncthreads();",
        patch="bits[word] = 0;",
    ),
    HopperBug(
        name="bits of a word set one by one without atomics",
        attention="hopper_lists",
        story="threads that set bits of one word took them from each other",
        anchor="atomicOr(&bits[block / 32], (int)(1u << block % 32));",
        patch="bits[block / 32] = (int)(1u << block % 32);",
    ),
    HopperBug(
        name="entries behind the count",
        attention="hopper_lists",
        story="counts were not looked at",
        anchor="place < count; place += LIST_THREADS",
        patch="place < args.S; place += LIST_THREADS",
    ),
    HopperBug(
        name="the list of another head in the producer",
        attention="hopper_lists",
        story="the producer walked over the list of the work tile before",
        anchor="const int list_line = work.list_line; const int h_kv = h / G;",
        patch="const int list_line = max(work.list_line - 1, 0); const int h_kv = h / G;",
    ),
    HopperBug(
        name="dq past the first word",
        attention="hopper_lists",
        file="backward_dq_kept",
        story="bits of a word were counted from its other end",
        anchor="const int found = 32 * word + 31 - __clz(named & -named);",
        patch="const int found = 32 * word + 31 - __clz(named);",
    ),
    HopperBug(
        name="dq of blocks that were seen",
        attention="hopper_lists",
        file="backward_dq_kept",
        story="the bits before the place at hand were kept",
        anchor="u32 named = (u32)row[word] & 0xffffffffu << block % 32;",
        patch="u32 named = (u32)row[word];",
    ),
    HopperBug(
        name="bits of queries of one head for all",
        attention="hopper_lists",
        file="backward_lists",
        story="lists were inverted together for all heads",
        anchor="(i_0 * args.Hkv + i_1) * args.list_blocks + block",
        patch="(i_0 * args.Hkv) * args.list_blocks + block",
    ),
    HopperBug(
        name="bits of queries of 32 blocks in one",
        attention="hopper_lists",
        file="backward_lists",
        story="the bit was that of the word",
        anchor="(int)(1u << i_2 % 32)",
        patch="(int)(1u << i_2 / 32)",
    ),
    HopperBug(
        name="the inverted list of the block of keys before",
        attention="hopper_lists",
        file="backward_dkdv",
        story="blocks of keys were numbered from one",
        anchor="* list_blocks + kv_lo / 128;",
        patch="* list_blocks + max(kv_lo / 128 - 1, 0);",
    ),
    HopperBug(
        name="repeated keys counted twice",
        attention="hopper_tokens",
        story="keys were counted as entries are, not as bits",
        anchor="if (threadIdx.x == 0) row[0] = found;",
        patch="if (threadIdx.x == 0) row[0] = count;",
    ),
    HopperBug(
        name="keys of threads before not counted",
        attention="hopper_tokens",
        story="each thread wrote its keys from the first place on",
        anchor="at += i < warp ? totals[i] : 0;",
        patch="at += 0;",
    ),
    HopperBug(
        name="bits of keys read before all are set",
        attention="hopper_tokens",
        story="threads that count bits did not wait for those that set them",
        anchor="__syncthreads(); int own = 0;",
        patch="int own = 0;",
    ),
    HopperBug(
        name="the list of the first query",
        attention="hopper_tokens",
        story="lists were numbered by sequences and heads",
        anchor="((long long)b * Hkv + h_kv) * M + q_lo",
        patch="((long long)b * Hkv + h_kv) * M",
    ),
)
