"""Bugs planted in scores of Hopper's kernels: tiles of pairs, columns beside those of K, polynomials."""

from __future__ import annotations

from tests.planted.bug import HopperBug, Place

BUGS: tuple[HopperBug, ...] = (
    # Tiles of pairs
    HopperBug(
        name="pairs not waited for",
        attention="hopper_pairs",
        story="they are copied with K, so that its barrier seemed to do for both",
        anchor=(
            "mbarrier_wait(barrier_of(base, PAIR_FULL, pairs.index), pairs.phase);"
            " next_p(kind, kv_lo, finish_pv);"
        ),
        patch="next_p(kind, kv_lo, finish_pv);",
    ),
    HopperBug(
        name="first pairs not waited for",
        attention="hopper_pairs",
        story="the wait was put into the step, which the first tile does not take",
        anchor="mbarrier_wait(barrier_of(base, PAIR_FULL, pairs.index), pairs.phase); first_p(kv_lo);",
        patch="first_p(kv_lo);",
    ),
    HopperBug(
        name="pairs given back before they are read",
        attention="hopper_pairs",
        story="the arrival was put where the tile had come, as that of K is behind its product",
        anchor="mbarrier_wait(barrier_of(base, PAIR_FULL, pairs.index), pairs.phase); first_p(kv_lo);",
        patch=(
            "mbarrier_wait(barrier_of(base, PAIR_FULL, pairs.index), pairs.phase);"
            " mbarrier_arrive_if(barrier_of(base, PAIR_EMPTY, pairs.index), lane == 0); first_p(kv_lo);"
        ),
        also=(
            Place(
                anchor="row_maxima(m, scores); release_loaded();",
                patch="row_maxima(m, scores); pairs.advance();",
            ),
        ),
    ),
    HopperBug(
        name="who copies pairs starts with the parity of who reads them",
        attention="hopper_pairs",
        story="a fresh barrier lets pass who waits for parity 1",
        anchor="PipelineState<PAIR_STAGES> pairs = {0, 1};",
        patch="PipelineState<PAIR_STAGES> pairs = {0, 0};",
    ),
    HopperBug(
        name="pairs of one warpgroup waited for",
        attention="hopper_pairs",
        story="a warpgroup reads its own rows, and the tile was taken for two",
        anchor="mbarrier_init(barrier_of(base, PAIR_EMPTY, i), 4 * CONSUMERS);",
        patch="mbarrier_init(barrier_of(base, PAIR_EMPTY, i), 4);",
    ),
    HopperBug(
        name="one piece of pairs announced",
        attention="hopper_pairs",
        story="a tile of 64 keys is one piece, and that was the first one",
        anchor="mbarrier_expect(barrier_of(base, PAIR_FULL, pairs.index), PAIR_BYTES);",
        patch="mbarrier_expect(barrier_of(base, PAIR_FULL, pairs.index), PAIR_BYTES / PAIR_PANELS);",
    ),
    HopperBug(
        name="the same keys in every piece of pairs",
        attention="hopper_pairs",
        story="a piece was told by its place in shared memory alone",
        anchor="kv_lo + PAIR_COLUMNS * panel, q_lo",
        patch="kv_lo, q_lo",
    ),
    HopperBug(
        name="pairs of the first head",
        attention="hopper_pairs",
        story="the bias was one for all heads before it had an axis for them",
        anchor="PAIR_COLUMNS * panel, q_lo, h, 0",
        patch="PAIR_COLUMNS * panel, q_lo, 0, 0",
    ),
    # Columns of keys
    HopperBug(
        name="columns not counted at the barrier of K",
        attention="hopper_keys",
        story="the barrier was that of the copy alone before columns were put beside K",
        anchor="mbarrier_init(barrier_of(base, K_FULL, i), 1 + 1);",
        patch="mbarrier_init(barrier_of(base, K_FULL, i), 1);",
    ),
    HopperBug(
        name="columns not shown to the tensor cores",
        attention="hopper_keys",
        story="other values of keys are read by threads, and need no fence",
        anchor=(
            "proxy_fence(); __syncwarp(); mbarrier_arrive_if(barrier_of(base, K_FULL, k.index), lane == 0);"
        ),
        patch="__syncwarp(); mbarrier_arrive_if(barrier_of(base, K_FULL, k.index), lane == 0);",
    ),
    HopperBug(
        name="columns arrive before all lanes have written",
        attention="hopper_keys",
        story="the fence of each lane was taken for one of the warp",
        anchor=(
            "proxy_fence(); __syncwarp(); mbarrier_arrive_if(barrier_of(base, K_FULL, k.index), lane == 0);"
        ),
        patch="proxy_fence(); mbarrier_arrive_if(barrier_of(base, K_FULL, k.index), lane == 0);",
    ),
    HopperBug(
        name="columns written over while they are read",
        attention="hopper_keys",
        story="values wait in registers until there is room, and the wait for room was for the copy",
        anchor="mbarrier_wait(barrier_of(base, K_EMPTY, k.index), k.phase); #pragma unroll",
        patch="#pragma unroll",
    ),
    HopperBug(
        name="columns of the first stage",
        attention="hopper_keys",
        story="there was one buffer of them",
        anchor="columns + k.index * (COLUMNS_BYTES / 16)",
        patch="columns",
    ),
    # Capped scores
    HopperBug(
        name="scores beyond a polynomial not told",
        attention="hopper_capped",
        story="the limit of sums was that of a lazy maximum, which is far above",
        anchor="known[r] = near[r] ? fminf(exp2_(NEAR - m[r]), 1e30f) : 1e30f;",
        patch="known[r] = 1e30f;",
    ),
)
