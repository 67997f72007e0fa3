"""Bugs planted in what serves on Hopper: two warpgroups that take turns, pages, stages given back."""

from __future__ import annotations

from tests.planted.bug import HopperBug, Place

BUGS: tuple[HopperBug, ...] = (
    # Two warpgroups that share the columns of o
    HopperBug(
        name="columns of the other warpgroup not waited for",
        attention="hopper_mla",
        story="a tile had one barrier before its parts had one each",
        anchor="wait(own, 1 - consumer); wgmma_fence();",
        patch="wgmma_fence();",
    ),
    HopperBug(
        name="p of the other warpgroup not waited for",
        attention="hopper_mla",
        story="its scores take longer, so that p had always been there",
        anchor="mbarrier_wait(barrier_of(base, P_FULL, 1 - consumer), parity);",
        patch="",
    ),
    HopperBug(
        name="parity of p not turned around",
        attention="hopper_mla",
        story="a tile each was right",
        anchor="parity ^= 1;",
        patch="",
    ),
    HopperBug(
        name="p overwritten while it is read",
        attention="hopper_mla",
        story="a stage was given back, and p stored, as soon as the product was issued",
        anchor="wgmma_wait<1>(); warpgroup_fence_operand(acc); release(other);",
        patch="warpgroup_fence_operand(acc); release(other);",
    ),
    HopperBug(
        name="no fence between p and what reads it",
        attention="hopper_mla",
        story="stores of threads and reads of tensor cores were ordered by the barrier alone",
        anchor="p[n][3]); proxy_fence();",
        patch="p[n][3]);",
    ),
    HopperBug(
        name="sums not brought under the other's maximum",
        attention="hopper_mla",
        story="o was rescaled, and l is of own tiles alone",
        anchor="m[r] = m_new; l[r] *= alpha[r]; } rescale(alpha); clear_values",
        patch="m[r] = m_new; } rescale(alpha); clear_values",
    ),
    HopperBug(
        name="o not brought under the other's maximum",
        attention="hopper_mla",
        story="maxima seldom grow after the first tiles",
        anchor="l[r] *= alpha[r]; } rescale(alpha); clear_values",
        patch="l[r] *= alpha[r]; } clear_values",
    ),
    HopperBug(
        name="p of the last tile forgotten",
        attention="hopper_mla",
        story="the loop ends with an own tile, behind which there may be one of the other's",
        anchor="if (other_lo < end) { start_other(other_lo);",
        patch="if (false) { start_other(other_lo);",
    ),
    HopperBug(
        name="sums of one warpgroup",
        attention="hopper_mla",
        story="each sums p of its own tiles",
        anchor="l[r] += load_shared<float>(sums + ((1 - consumer) * BLOCK_M + 8 * r) * 4);",
        patch="",
    ),
    HopperBug(
        name="columns outside of V not announced",
        attention="hopper_mla",
        story="the bytes of a half were counted, with which the others come",
        anchor="begin(odd, own(HALF, producer) + own(REST, producer))",
        patch="begin(odd, own(HALF, producer))",
    ),
    HopperBug(
        name="halves always in the same order",
        attention="hopper_mla",
        story="columns that are not in V came with the first half, for either warpgroup",
        anchor="odd = !odd;",
        patch="",
    ),
    HopperBug(
        name="values behind the sequence not cleared for the other's tiles",
        attention="hopper_mla",
        story="each warpgroup clears its own columns, of all tiles",
        anchor="rescale(alpha); "
        "clear_values(kv_lo, base + K_AT + other.index * K_BYTES + consumer * HALF * BLOCK_N * 128);",
        patch="rescale(alpha);",
    ),
    # Stages and pages
    HopperBug(
        name="stage given back by all warps but one",
        attention="hopper_gqa",
        story="the count was that of a block with fewer warps",
        anchor="mbarrier_init(barrier_of(base, EMPTY, i), 4);",
        patch="mbarrier_init(barrier_of(base, EMPTY, i), 3);",
    ),
    HopperBug(
        name="values given back before their product",
        attention="hopper_gqa",
        story="the arrival was put behind the issue",
        anchor="wgmma_wait<0>(); warpgroup_fence_operand(acc); warpgroup_fence_operand(p); "
        "release(PARTS - 1);",
        patch="release(PARTS - 1); "
        "wgmma_wait<0>(); warpgroup_fence_operand(acc); warpgroup_fence_operand(p);",
    ),
    HopperBug(
        name="pages of the tile before",
        attention="hopper_gqa",
        story="lanes have the pages of several tiles, and those of the first were taken for all",
        anchor="shuffle(pages, taken++ * BOXES + lane % BOXES)",
        patch="shuffle(pages, lane % BOXES)",
    ),
    HopperBug(
        name="first tile copied twice",
        attention="hopper_gqa",
        story="it was copied early, and the loop began with it",
        anchor="kv_lo = is_early ? next(first) : first;",
        patch="kv_lo = first;",
    ),
    HopperBug(
        name="boxes without keys announced",
        attention="hopper_gqa",
        story="all boxes of a tile were announced, of which the last has fewer",
        anchor="panels * boxes * BOX * 128",
        patch="panels * BOXES * BOX * 128",
    ),
    HopperBug(
        name="q not there for all warps",
        attention="hopper_gqa",
        story="each warp waited for what it had copied itself",
        anchor="t = lane % 4; named_barrier_sync(1, 128 * CONSUMERS);",
        patch="t = lane % 4;",
    ),
    HopperBug(
        name="values behind the sequence not cleared",
        attention="hopper_gqa",
        story="their p is 0, but 0 * NaN is NaN",
        anchor="if (kv_idx < N) continue;",
        patch="continue;",
    ),
    # Pages in prefill, where V comes a tile behind K
    HopperBug(
        name="V from the pages of K",
        attention="hopper_pages",
        story="a tile had one set of pages, before its V was copied behind the next K",
        anchor="v_page = page; page = page_of(kv_lo + box * BOX);",
        patch="page = page_of(kv_lo + box * BOX); v_page = page;",
    ),
    HopperBug(
        name="length of the tile before",
        attention="hopper_pages",
        story="a block takes several tiles, and N was shortened for one and for good",
        anchor="int N = args.N; const int",
        patch="int& N = shortened; const int",
        also=(Place(anchor="auto claim =", patch="int shortened = args.N; auto claim ="),),
    ),
    HopperBug(
        name="every lane announces",
        attention="hopper_pages",
        story="what one thread did became a warp's, lane by lane",
        anchor="if (lane == 0) mbarrier_expect(barrier_of(base, V_FULL, v.index), count * BOX * 128);",
        patch="mbarrier_expect(barrier_of(base, V_FULL, v.index), count * BOX * 128);",
    ),
    # Several warps that copy
    HopperBug(
        name="keys ready with the pieces of one warp",
        attention="hopper_pages",
        story="one warp copied before two did",
        anchor="mbarrier_init(barrier_of(base, K_FULL, i), PRODUCERS);",
        patch="mbarrier_init(barrier_of(base, K_FULL, i), 1);",
    ),
    HopperBug(
        name="every warp copies all pieces of V",
        attention="hopper_gqa",
        story="the pieces were not shared out where V was added",
        anchor="begin(1, own(V_PANELS, turn)), 0, V_PANELS, turn);",
        patch="begin(1, V_PANELS), 0, V_PANELS, 0);",
    ),
    HopperBug(
        name="a lane announces before the others have waited",
        attention="hopper_gqa",
        story="a warp with nothing to copy waited for nobody",
        anchor="const u32 full = barrier_of(base, FULL, PARTS * next_stage.index + part); __syncwarp();",
        patch="const u32 full = barrier_of(base, FULL, PARTS * next_stage.index + part);",
    ),
    # Packed queries
    HopperBug(
        name="tiles of packed queries counted by queries",
        attention="hopper_ragged",
        story="a tile of a prompt has rows of one head, and was looked for so",
        anchor="number, B, G);",
        patch="number, B, 1);",
    ),
    HopperBug(
        name="a tile further in every sequence",
        attention="hopper_ragged",
        story="the tile that a sequence has more was not taken off",
        anchor="(number - q_first * G / BLOCK_M - sequence)",
        patch="(number - q_first * G / BLOCK_M)",
    ),
    HopperBug(
        name="packed o stored from the first row on",
        attention="hopper_ragged",
        story="rows had an axis of sequences before",
        anchor="args.o_ptr + (q_first + row / G)",
        patch="args.o_ptr + (row / G)",
    ),
    HopperBug(
        name="rows behind the last sequence are queries",
        attention="hopper_ragged",
        story="they have rows to write, and were given its keys",
        anchor="int M = sequence < B ? q_rows : 0;",
        patch="int M = q_rows;",
    ),
    HopperBug(
        name="no tile for what a sequence has beyond whole ones",
        attention="hopper_ragged",
        story="tiles that may have no rows were left out, and with them others",
        anchor="if (row_lo >= q_rows * G)",
        patch="if (row_lo + BLOCK_M > q_rows * G && row_lo > 0)",
    ),
    HopperBug(
        name="segments of packed rows by their place in a sequence",
        attention="hopper_packed_segments",
        story="rows were counted from the first one of their sequence, as where each has an axis",
        anchor="*(Four*)(to + 8 * j)",
        patch="*(Four*)(to - (long long)q_first * args.SPLITS * DV + 8 * j)",
    ),
    HopperBug(
        name="segments behind the last key joined",
        attention="hopper_packed_segments",
        story="a block without a key was thought to leave zeros",
        anchor="for (int last = to - 1; last >= from; last -= AHEAD)",
        patch="for (int last = args.SPLITS - 1; last >= from; last -= AHEAD)",
    ),
    HopperBug(
        name="a segment without a key that says nothing",
        attention="hopper_packed_segments",
        story="what joins segments was thought to know where keys end",
        anchor="+ q_first + q) * args.SPLITS + split] = Pair{{-INF, 0.0f}};",
        patch="+ q_first + q) * args.SPLITS + split] = Pair{{0.0f, 0.0f}};",
    ),
)
