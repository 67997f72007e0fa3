"""Bugs planted in how the kernels of mma.sync walk over the blocks that lists name, and in the bits that are
made of the lists first.
"""

from __future__ import annotations

from tests.planted.bug import CudaBug, Place

BUGS: tuple[CudaBug, ...] = (
    CudaBug(
        name="one tile of a block",
        attention="cuda_lists",
        story="a walk went from block to block, whatever tiles a block has",
        anchor="u32 named = (u32)row[word] & 0xffffffffu << block % 32;",
        patch=(
            "u32 named = (u32)row[word] & 0xffffffffu << block % 32"
            " & ~((at % LISTED_BLOCK != 0) << block % 32);"
        ),
    ),
    CudaBug(
        name="the word behind not looked at",
        attention="cuda_listed_steps",
        story="a list was thought to have 32 blocks",
        anchor="if (++word >= words) return NONE;",
        patch="return NONE;",
    ),
    CudaBug(
        name="queries without a list have the first one",
        attention="cuda_lists",
        story="a negative number of a list was thought not to occur",
        anchor="if (line < 0 || word >= words)",
        patch="if (word >= words)",
        also=(
            Place(
                anchor="const int* const row = bits + (long long)line * words;",
                patch="const int* const row = bits + (long long)max(line, 0) * words;",
            ),
        ),
    ),
    CudaBug(
        name="values of tiles one behind the other",
        attention="cuda_lists",
        story="copies of k went from listed tile to listed tile, and those of v through all",
        anchor="v_next = next(v_next);",
        patch="v_next += BLOCK_N;",
    ),
    CudaBug(
        name="queries of one head for all",
        attention="cuda_lists",
        file="backward_lists",
        story="lists were inverted together for all heads",
        anchor="(i_0 * args.Hkv + i_1) * args.list_blocks + block",
        patch="(i_0 * args.Hkv) * args.list_blocks + block",
    ),
    CudaBug(
        name="the inverted list of the block of keys before",
        attention="cuda_lists",
        file="backward_dkdv",
        story="blocks of keys were numbered from one",
        anchor="* list_blocks + kv_lo / 32;",
        patch="* list_blocks + max(kv_lo / 32 - 1, 0);",
    ),
)
