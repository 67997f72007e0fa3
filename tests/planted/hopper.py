"""Bugs planted in Hopper's kernels: what goes wrong between warps that copy and warps that multiply."""

from __future__ import annotations

from tests.planted.bug import HopperBug

BUGS: tuple[HopperBug, ...] = (
    # Waits for copies
    HopperBug(
        name="K not waited for",
        attention="hopper",
        story="the copy had always arrived, while the softmax was slow",
        anchor="barrier_of(base, K_FULL, k.index), k.phase); wgmma_fence(); issue_qk(); issue_pv",
        patch="barrier_of(base, Q_FULL, q.index), q.phase); wgmma_fence(); issue_qk(); issue_pv",
    ),
    HopperBug(
        name="first K not waited for",
        attention="hopper",
        story="the wait for Q was taken for one for both, which are copied together",
        anchor="barrier_of(base, K_FULL, k.index), k.phase); wgmma_fence(); issue_qk(); wgmma_wait<0>",
        patch="barrier_of(base, Q_FULL, q.index), q.phase); wgmma_fence(); issue_qk(); wgmma_wait<0>",
    ),
    HopperBug(
        name="Q not waited for",
        attention="hopper",
        story="Q was waited for before the loop over tiles, and is copied once for each",
        anchor="mbarrier_wait(barrier_of(base, Q_FULL, q.index), q.phase);",
        patch="",
    ),
    HopperBug(
        name="first V not waited for",
        attention="hopper",
        story="only the loop waited for V, and a row of tiles may have a single one",
        anchor="while (skipped_v > 0) skip_v(); mbarrier_wait(barrier_of(base, V_FULL, v.index), v.phase);",
        patch="while (skipped_v > 0) skip_v();",
    ),
    HopperBug(
        name="V of the tile at hand waited for",
        attention="hopper",
        story="the wait was moved in front of the product and kept its stage",
        anchor="mbarrier_wait(barrier_of(base, V_FULL, next.index), next.phase);",
        patch="mbarrier_wait(barrier_of(base, V_FULL, v.index), v.phase);",
    ),
    # Phases
    HopperBug(
        name="producer starts with the parity of consumers",
        attention="hopper",
        story="a fresh barrier lets pass who waits for parity 1, and the producer waited for 0",
        anchor="PipelineState<STAGES> k = {0, 1}, v = {0, 1};",
        patch="PipelineState<STAGES> k = {0, 0}, v = {0, 0};",
    ),
    HopperBug(
        name="parity not turned around",
        attention="hopper",
        story="two tiles were right: a ring has to go around before its parity matters",
        anchor="PipelineState{0, phase ^ 1}",
        patch="PipelineState{0, phase}",
    ),
    HopperBug(
        name="parity turned at every stage",
        attention="hopper",
        story="the parity was kept by tile and not by round",
        anchor=": PipelineState{index + 1, phase}",
        patch=": PipelineState{index + 1, phase ^ 1}",
    ),
    # Stages given back
    HopperBug(
        name="K given back before its product",
        attention="hopper",
        story="the arrival was put behind the issue, where a synchronous product would have ended",
        anchor="wgmma_wait<1>(); warpgroup_fence_operand(scores); release_k(last);",
        patch="release_k(last); wgmma_wait<1>(); warpgroup_fence_operand(scores);",
    ),
    HopperBug(
        name="V given back before its product",
        attention="hopper",
        story="the same, for the second product, which runs longer",
        anchor="wgmma_wait<0>(); warpgroup_fence_operand(acc); warpgroup_fence_operand(p); release_v(); };",
        patch="release_v(); wgmma_wait<0>(); warpgroup_fence_operand(acc); warpgroup_fence_operand(p); };",
    ),
    HopperBug(
        name="Q given back with every K",
        attention="hopper",
        story="Q was released where K is, without asking whether this was the last",
        anchor="mbarrier_arrive_if(barrier_of(base, Q_EMPTY, q.index), last && lane == 0);",
        patch="mbarrier_arrive_if(barrier_of(base, Q_EMPTY, q.index), lane == 0);",
    ),
    HopperBug(
        name="arrivals one too few for K",
        attention="hopper",
        story="the stage was free when all warps but one had read it",
        anchor="mbarrier_init(barrier_of(base, K_EMPTY, i), 4 * CONSUMERS);",
        patch="mbarrier_init(barrier_of(base, K_EMPTY, i), 4 * CONSUMERS - 1);",
    ),
    HopperBug(
        name="arrivals of one warpgroup for V",
        attention="hopper",
        story="written for one warpgroup, and then there were two",
        anchor="mbarrier_init(barrier_of(base, V_EMPTY, i), 4 * CONSUMERS);",
        patch="mbarrier_init(barrier_of(base, V_EMPTY, i), 4);",
    ),
    HopperBug(
        name="arrivals counted by threads",
        attention="hopper",
        story="one lane of a warp arrives, and the count was that of threads: it hangs",
        anchor="mbarrier_init(barrier_of(base, V_EMPTY, i), 4 * CONSUMERS);",
        patch="mbarrier_init(barrier_of(base, V_EMPTY, i), 128 * CONSUMERS);",
    ),
    # Bytes
    HopperBug(
        name="bytes of one box of two",
        attention="hopper",
        story="wide heads are two boxes, and the count was that of the first",
        anchor="mbarrier_expect(barrier_of(base, K_FULL, k.index), K_BYTES);",
        patch="mbarrier_expect(barrier_of(base, K_FULL, k.index), K_BYTES / QK_PANELS);",
    ),
    HopperBug(
        name="bytes of the rows that exist",
        attention="hopper",
        story="rows past the end are zeros that count too: only the last tile hangs",
        anchor="mbarrier_expect(barrier_of(base, V_FULL, v.index), V_BYTES);",
        patch="mbarrier_expect(barrier_of(base, V_FULL, v.index), 256 * min(BLOCK_N, args.N - v_lo));",
    ),
    # Fences
    HopperBug(
        name="no proxy fence before o is stored",
        attention="hopper",
        story="stmatrix writes by another way than TMA reads",
        anchor="proxy_fence(); __syncwarp(); if (lane == 0) {",
        patch="__syncwarp(); if (lane == 0) {",
    ),
    HopperBug(
        name="barriers not shown to the copy engine",
        attention="hopper",
        story="the fence behind the initialisation looked like a second barrier",
        anchor="mbarrier_fence(); } __syncthreads();",
        patch="} __syncthreads();",
    ),
    HopperBug(
        name="barriers used before they are made",
        attention="hopper",
        story="the fence was taken for a barrier of the block",
        anchor="mbarrier_fence(); } __syncthreads();",
        patch="mbarrier_fence(); }",
    ),
    HopperBug(
        name="no wgmma fence before products",
        attention="hopper",
        story="P and acc had just been written by ordinary instructions",
        anchor="wgmma_fence(); issue_qk(); issue_pv",
        patch="issue_qk(); issue_pv",
    ),
    # Registers of a product under way
    HopperBug(
        name="P rounded while it is read",
        attention="hopper",
        story="the product before had only been started",
        anchor="finish(); scale_rows(acc, alpha); round_fragments(p, scores);",
        patch="round_fragments(p, scores); finish(); scale_rows(acc, alpha);",
    ),
    HopperBug(
        name="acc rescaled while it is added to",
        attention="hopper",
        story="the factor is known before the product ends",
        anchor="finish(); scale_rows(acc, alpha); round_fragments(p, scores);",
        patch="scale_rows(acc, alpha); finish(); round_fragments(p, scores);",
    ),
    HopperBug(
        name="waits for one product too few",
        attention="hopper",
        story="a single group is under way, and the newest was allowed to be",
        anchor="mbarrier_wait(barrier_of(base, V_FULL, next.index), next.phase); wgmma_wait<0>();",
        patch="mbarrier_wait(barrier_of(base, V_FULL, next.index), next.phase); wgmma_wait<1>();",
    ),
    # The output
    HopperBug(
        name="o staged while the one before is stored",
        attention="hopper",
        story="a store reads shared memory when it likes",
        anchor="if (lane == 0) tma_wait_read(); __syncwarp();",
        patch="__syncwarp();",
    ),
    HopperBug(
        name="o stored before all lanes have written it",
        attention="hopper",
        story="lane 0 was through first",
        anchor="proxy_fence(); __syncwarp(); if (lane == 0) {",
        patch="proxy_fence(); if (lane == 0) {",
    ),
    HopperBug(
        name="stores not committed",
        attention="hopper",
        story="a wait for groups does not wait for what is in none",
        anchor="tma_commit();",
        patch="",
    ),
    HopperBug(
        name="block ends while o is stored",
        attention="hopper",
        story="shared memory belonged to the next block while it was still read",
        anchor="if (O_TILES && lane == 0) tma_wait();",
        patch="",
    ),
    HopperBug(
        name="o staged without the swizzle",
        attention="hopper",
        story="the map of o has the swizzle that the map of q has",
        anchor="((j % 8 + lane / 16) ^ row % 8) * 16",
        patch="(j % 8 + lane / 16) * 16",
    ),
    # Layouts
    HopperBug(
        name="groups of 8 rows half as far apart",
        attention="hopper",
        story="the stride of the 64-byte swizzle",
        anchor="k_tiles = wgmma_descriptor(base + K_AT, 16, 1024)",
        patch="k_tiles = wgmma_descriptor(base + K_AT, 16, 512)",
    ),
    HopperBug(
        name="pieces of V as far apart as those of Q",
        attention="hopper",
        story="the tile has as many rows as there are keys, not queries",
        anchor="wgmma_descriptor(base + V_AT, BLOCK_N * 128, 1024)",
        patch="wgmma_descriptor(base + V_AT, BLOCK_M * 128, 1024)",
    ),
    HopperBug(
        name="second warpgroup multiplies the first one's rows",
        attention="hopper",
        story="the descriptor of Q was that of the tile",
        anchor="wgmma_descriptor(base + Q_AT + 64 * consumer * 128, 16, 1024)",
        patch="wgmma_descriptor(base + Q_AT, 16, 1024)",
    ),
    # Registers of warpgroups
    HopperBug(
        name="more registers than the block has",
        attention="hopper",
        story="the producer kept 16 more than the sum allows: the last warps wait for ever",
        anchor="warpgroup_reg_dealloc<PRODUCER_REGISTERS>();",
        patch="warpgroup_reg_dealloc<PRODUCER_REGISTERS + 16>();",
    ),
    # The lazy maximum
    HopperBug(
        name="maximum never looked for again",
        attention="hopper",
        story="no test had scores that rise by more than the headroom",
        anchor="const bool exceeds = any_lane(!(sum[0] < SUM_LIMIT && sum[1] < SUM_LIMIT));",
        patch="const bool exceeds = false;",
    ),
    HopperBug(
        name="sums not scaled when the maximum moves",
        attention="hopper",
        story="the probabilities were, and the sum of the tile at hand had been taken before",
        anchor="l[r] *= alpha[r]; sum[r] *= alpha[r];",
        patch="l[r] *= alpha[r];",
    ),
    HopperBug(
        name="-inf subtracted from -inf",
        attention="hopper_documents",
        story="a row that sees nothing in two tiles has the same maximum twice, and their difference is NaN",
        anchor="alpha[r] = exp2_(m[r] - (top[r] == -INF ? 0.0f : top[r]));",
        patch="alpha[r] = exp2_(m[r] - top[r]);",
    ),
    HopperBug(
        name="the sign of a scale lost",
        attention="negative",
        story="where no maximum is looked for, the exponents were those of the products",
        anchor="s = exp2_(-(s * NUMBERf) - m[r]);",
        patch=lambda factor: f"s = exp2_(s * {factor!r}f - m[r]);",
    ),
    HopperBug(
        name="a jump past all exponents not noticed",
        attention="hopper",
        story="the exponentials had overflowed, and said nothing of how far",
        anchor="failed |= (u32)(!(most < 1e30f)) << r;",
        patch="",
    ),
)
