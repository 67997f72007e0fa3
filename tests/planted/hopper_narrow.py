"""Bugs planted where keys and values of 8 bits are converted on Hopper: whose rows, when, to what."""

from __future__ import annotations

from tests.planted.bug import HopperBug

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="rows converted before they are there",
        attention="hopper_narrow",
        story="a copy of the tile before was long done",
        anchor="mbarrier_wait(raw_full(0), raw.phase); begin(0);",
        patch="begin(0);",
    ),
    HopperBug(
        name="tile overwritten while it is multiplied",
        attention="hopper_narrow",
        story="the stage was waited for where it was copied, and now nothing is copied to it",
        anchor="begin(1); convert_v();",
        patch="convert_v();",
    ),
    HopperBug(
        name="no fence between conversion and product",
        attention="hopper_narrow",
        story="TMA had written the tile through the proxy that wgmma reads through",
        anchor="proxy_fence(); __syncwarp(); mbarrier_arrive_if(barrier_of(base, FULL,",
        patch="__syncwarp(); mbarrier_arrive_if(barrier_of(base, FULL,",
    ),
    HopperBug(
        name="tile full before all lanes have written",
        attention="hopper_narrow",
        story="the lane that arrives had written its rows",
        anchor="proxy_fence(); __syncwarp(); mbarrier_arrive_if(barrier_of(base, FULL,",
        patch="proxy_fence(); mbarrier_arrive_if(barrier_of(base, FULL,",
    ),
    HopperBug(
        name="next rows copied over those that are converted",
        attention="hopper_narrow",
        story="the copy was to begin as early as it could",
        anchor="begin(1); convert_v(); end_part(1); if (copy_lo < end) copy_v(page);",
        patch="if (copy_lo < end) copy_v(page); begin(1); convert_v(); end_part(1);",
    ),
    HopperBug(
        name="rows of another warp converted",
        attention="hopper_narrow",
        story="four warps had equal tiles of ones",
        anchor="base + RAW_K_AT + raw.index * RAW_K_BYTES + own_row * 128, base + K_AT",
        patch="base + RAW_K_AT + raw.index * RAW_K_BYTES + (own_row + OWN_ROWS) % BLOCK_N * 128, base + K_AT",
    ),
    HopperBug(
        name="pages of the first tile for all",
        attention="hopper_narrow",
        story="lanes have the pages of several tiles",
        anchor="shuffle(pages, taken * OWN_BOXES + lane % OWN_BOXES)",
        patch="shuffle(pages, lane % OWN_BOXES)",
    ),
    HopperBug(
        name="tile of 8 bits converted once more",
        attention="hopper_narrow",
        story="stages of 16 bits went on, those of 8 did not",
        anchor="raw.advance(); stage.advance();",
        patch="stage.advance();",
    ),
    HopperBug(
        name="the first tile copied again",
        attention="hopper_narrow",
        story="it had been copied before the length was known",
        anchor="for (int i = is_early; i < RAW_TILES",
        patch="for (int i = 0; i < RAW_TILES",
    ),
    HopperBug(
        name="o not multiplied by the scale of v",
        attention="hopper_narrow",
        story="the kernel for 16 bits has none",
        anchor="scale = v_scale_q[r];",
        patch="scale = 1.0f;",
    ),
    HopperBug(
        name="columns outside of V not converted",
        attention="hopper_narrow_latent",
        story="tests had values in all of the keys",
        anchor="convert_k(Panels<REST>{}, V_PANELS);",
        patch="",
    ),
    HopperBug(
        name="rows copied by other lanes not waited for",
        attention="hopper_narrow_latent",
        story="each lane had waited for its own copies",
        anchor="mbarrier_wait(raw_full(0), raw.phase); __syncwarp();",
        patch="__syncwarp();",
    ),
    HopperBug(
        name="rows past the last key read",
        attention="hopper_narrow_latent",
        story="their pages are 0, whose rows exist",
        anchor="lane < OWN_ROWS && kv_idx < N ?",
        patch="lane < OWN_ROWS ?",
    ),
    HopperBug(
        name="tile of a prompt converted before its rows are there",
        attention="hopper_narrow_prompt",
        story="a copy of the tile before was long done",
        anchor="mbarrier_wait(raw_full(0, raw_k.index), raw_k.phase);",
        patch="",
    ),
    HopperBug(
        name="values of a prompt from the pages of later keys",
        attention="hopper_narrow_prompt",
        story="both were copied at once, before K went ahead",
        anchor="1, 128, copied_lo, copied_page);",
        patch="1, 128, copied_lo, copy_page);",
    ),
    HopperBug(
        name="values of a prompt written over o that leaves",
        attention="hopper_narrow_prompt",
        story="nothing is copied to the tiles of V any more",
        anchor="if (v_lo >= 0) { await_o();",
        patch="if (v_lo >= 0) {",
    ),
)
