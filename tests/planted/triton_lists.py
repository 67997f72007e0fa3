"""Bugs planted in how Triton kernels walk over lists of blocks, and in what is made of the lists first."""

from __future__ import annotations

from tests.planted.bug import Place, TritonBug

#: Memory for few queries of a turn: with that of a call, all small cases have one.
_FEW_QUERIES = Place(anchor="67108864 //", patch="3000 //")

BUGS: tuple[TritonBug, ...] = (
    TritonBug(
        name="repeated blocks counted twice",
        attention="tokens",
        story="lists were thought to be distinct",
        anchor="named = tl.where(tl.max(again.to(tl.int32), 1) > 0, 0, named)",
        patch="named = tl.where(tl.max(again.to(tl.int32), 1) > 5, 0, named)",
    ),
    TritonBug(
        name="repeated blocks looked for among neighbours",
        attention="tokens",
        story="a chunk of entries was compared with itself alone",
        anchor="for start in range(0, first + 128, 64):",
        patch="for start in range(first, first + 128, 64):",
    ),
    TritonBug(
        name="entries behind the count",
        attention="blocks",
        story="the count was of the first list",
        anchor="cnt_ptr + i_0.to(tl.int64) * stride_cnt_0",
        patch="cnt_ptr + i_0.to(tl.int64) * 0",
    ),
    TritonBug(
        name="an entry that names no block is the first",
        attention="tokens",
        story="what a sentinel stands for was clamped into the range",
        anchor="named = ((entry >= 0) & (entry < list_blocks)).to(tl.int32)",
        patch="entry = tl.maximum(entry, 0); named = (entry < list_blocks).to(tl.int32)",
    ),
    TritonBug(
        name="the list of another head",
        attention="blocks",
        story="lists of K/V heads were numbered by query heads",
        anchor="(b.to(tl.int64) * Hkv + h // G) * R + q_lo // 32",
        patch="(b.to(tl.int64) * Hkv + h % Hkv) * R + q_lo // 32",
    ),
    TritonBug(
        name="the list of the block before",
        attention="blocks",
        story="the number of a block of queries was taken from the number of its tile",
        anchor="(b.to(tl.int64) * Hkv + h // G) * R + q_lo // 32",
        patch="(b.to(tl.int64) * Hkv + h // G) * R + q_lo // 64",
    ),
    TritonBug(
        name="queries without a list",
        attention="blocks",
        story="there was thought to be a list for every block of queries",
        anchor="q_lo // 32 >= R, -1,",
        patch="q_lo // 32 >= R, 0,",
    ),
    TritonBug(
        name="half of a block",
        attention="blocks",
        story="a tile for each entry, whatever a block has",
        anchor="range(0, listed * (32 // BLOCK_N))",
        patch="range(0, listed)",
    ),
    TritonBug(
        name="the diagonal of listed tiles not masked",
        attention="blocks",
        story="a listed tile was full, as in lists of full blocks",
        anchor="partial=kv_lo >= full_hi",
        patch="partial=kv_lo > full_hi",
    ),
    TritonBug(
        name="lists inverted across sequences",
        attention="blocks",
        story="the lists of a group were numbered from the first one",
        anchor="line = group * R + row",
        patch="line = row",
        phase="backward",
    ),
    TritonBug(
        name="as many lists inverted as fit in a chunk",
        attention="many_lists",
        story="there were 64 blocks of queries in the case that it was written with",
        anchor="for first in range(0, list_rows, 64):",
        patch="for first in range(0, tl.minimum(list_rows, 64), 64):",
        phase="backward",
    ),
    TritonBug(
        name="chunks of inverted lists from the first place on",
        attention="many_lists",
        story="places were counted within a chunk",
        anchor="at = found[None, :] + tl.cumsum(named, 0) - named",
        patch="at = tl.cumsum(named, 0) - named",
        phase="backward",
    ),
    TritonBug(
        name="keys past the last listed one",
        attention="tokens",
        story="the last tile of a list was taken to be whole",
        anchor="tl.where(place < keys, block * BLOCK + place % BLOCK, none)",
        patch="tl.where(place < keys + 1, block * BLOCK + place % BLOCK, none)",
    ),
    TritonBug(
        name="heads of the next query in a tile",
        attention="tokens",
        story="rows behind a group were taken to be heads",
        anchor="exists = (q_idx < M) & (head_of_group < G)",
        patch="exists = q_idx < M",
        also=(
            Place(
                anchor="h = h_kv * G + tl.minimum(head_of_group, G - 1)",
                patch="h = h_kv * G + head_of_group",
            ),
        ),
    ),
    TritonBug(
        name="places of the turn before",
        attention="chosen",
        story="memory that a query of this turn did not write was taken to be cleared",
        anchor="named = named & (entry * 2 + place % 2 == kv_idx[None, :])",
        patch="named = named & (place >= 0)",
        also=(_FEW_QUERIES,),
        phase="backward",
    ),
    TritonBug(
        name="sums of the turns before dropped",
        attention="chosen",
        story="it was written with one turn, and tried with two",
        anchor="mask=exists & (turn > 0), other=0.0",
        patch="mask=exists & (turn == 1), other=0.0",
        also=(_FEW_QUERIES,),
        phase="backward",
    ),
    TritonBug(
        name="the first key of a block alone",
        attention="chosen",
        story="an entry was taken for the number of a key",
        anchor="entry * 2 + place % 2 == kv_idx[None, :]",
        patch="entry * 2 == kv_idx[None, :]",
        phase="backward",
    ),
    TritonBug(
        name="eight queries of sixteen",
        attention="chosen",
        story="queries that are summed together became fewer, and the loop was forgotten",
        anchor="tl.minimum(turn_queries, M - turn * turn_queries), 8)",
        patch="tl.minimum(turn_queries, M - turn * turn_queries), 16)",
        phase="backward",
    ),
    TritonBug(
        name="delta of another head",
        attention="chosen",
        story="rows of delta were thought to be as many as queries",
        anchor="rows = (b * H + h).to(tl.int64) * M_padded + q_idx",
        patch="rows = (b * H + h).to(tl.int64) * M + q_idx",
        phase="backward",
    ),
    TritonBug(
        name="places within a tile",
        attention="chosen",
        story="places of a list were counted from the start of each tile",
        anchor="place = first + tl.arange(0, BLOCK_N)\n        pair",
        patch="place = tl.arange(0, BLOCK_N)\n        pair",
        phase="backward",
    ),
)
