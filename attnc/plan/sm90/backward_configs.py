"""Which tiles the Hopper kernels of gradients get, and what a block of them takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attnc.model.attention import Variant
from attnc.model.configs import configs
from attnc.model.schedule import BackwardConfig, Schedule, TileConfig
from attnc.plan.fitting import Tiles, backward_phase_of, nothing_fits
from attnc.plan.layout import Buffer, Estimate, KernelName
from attnc.plan.sm80.layout import over_rows
from attnc.plan.sm90.backward import DS_TILES, P_TILES, ROWS, STAGES, Sm90Backward
from attnc.plan.sm90.layout import PIECE, WGMMA_ROWS, beyond_shared_memory

#: Tiles of what streams through, if they fit, where two warpgroups wait for each other: 16 heads of 4k tokens
#: and 192 columns take 1,087 us and not 1,191 on an H200.
_STAGES_OF_SHARED = 3


def sm90_backward_configs(
    plan: Sm90Backward, variant: Variant, schedule: Schedule, kernel: KernelName
) -> tuple[BackwardConfig, ...]:
    """Returns the configs that can run, in their order. Raises DiagnosticError (E0601) when there is none."""
    phase = backward_phase_of(kernel)
    knobs = schedule.phases[phase]
    tile_q, tile_kv = plan.tile(kernel)
    tiles = Tiles(tile_q, tile_kv, 4 * (plan.consumers(kernel) + 1), STAGES)

    def fill(stages: int) -> list[BackwardConfig]:
        unset = replace(tiles, stages=stages).without(knobs)
        return [unset.of(config) for config in configs(schedule, phase, variant)]

    found = fill(STAGES)
    if kernel == "dkdv" and plan.gives_p:
        deep = (config for config in fill(_STAGES_OF_SHARED) if _misfit(config, plan, kernel) is None)
        found = [*deep] or found
    if over_rows(kernel) and "order" not in knobs:
        found = [replace(config, order="longest_first") for config in found]  # costs nothing
    candidates = tuple(dict.fromkeys(found))
    reasons = [_misfit(config, plan, kernel) for config in candidates]
    kept = tuple(config for config, reason in zip(candidates, reasons, strict=True) if reason is None)
    if not kept:
        hint = (
            f"write '{', '.join(f'{key} = {size}' for key, size in tiles.by_key().items())}', or remove them"
        )
        raise nothing_fits(schedule, kernel, reasons[0] or "", where=schedule.target, hints=(hint,))
    return kept


def _misfit(config: BackwardConfig, plan: Sm90Backward, kernel: KernelName) -> str | None:
    tile_q, tile_kv = plan.tile(kernel)
    room = f"what the registers of a head dimension of {max(plan.layout.d, plan.layout.dv)} leave room for"
    consumers = plan.consumers(kernel)
    stays = f"{WGMMA_ROWS} for each of {consumers} warpgroups"
    copying = f"4 for each of {consumers} warpgroups that multiply, and 4 that copy"
    for key, size, needed, why in (
        ("tile.q", config.tile_q, tile_q, stays if over_rows(kernel) else room),
        ("tile.kv", config.tile_kv, tile_kv, room if over_rows(kernel) else stays),
        ("warps", config.warps, 4 * (consumers + 1), copying),
    ):
        if size != needed:
            return f"{key} = {size} is not {needed}: {why}"
    if config.stages < 2:
        return "stages = 1 leaves nothing to copy ahead: two at least"
    if config.maxnreg is not None:
        return "maxnreg is not for warpgroups, which share registers as they need them"
    return beyond_shared_memory(plan.shared_memory(config, kernel), plan.room(kernel))


def sm90_backward_estimate(plan: Sm90Backward, config: TileConfig, kernel: KernelName) -> Estimate:
    """Returns what a block takes: shared memory exactly, registers as far as the plan knows."""
    d, dv, stages = plan.qk_panels * PIECE, plan.v_panels * PIECE, config.stages
    rows, keys = plan.tile(kernel)
    q_tiles, v_tiles = plan.dq_tiles
    piece = f"{plan.pieces} x {keys if over_rows(kernel) else rows}x{PIECE}" if plan.pieces else ""
    shapes: Mapping[str, str] = {
        "ds": f"{DS_TILES} x {rows}x{ROWS}",
        "p": f"{P_TILES} x {keys}x{rows} as f32",
        "staged": f"{4 * plan.consumers(kernel)} warps",
        "rows": f"{stages} x 2x{rows}",
        "barriers": "and what is known of tiles",
        **(
            {
                "q": f"{q_tiles} x {rows}x{d}",
                "do": f"{q_tiles} x {rows}x{dv}",
                "k": f"{stages} x {keys}x{d}",
                "v": piece or f"{stages if v_tiles > 1 else 1} x {keys}x{dv}",
            }
            if over_rows(kernel)
            else {
                "k": f"{plan.k_tiles(kernel)} x {keys}x{d}",
                "v": f"{keys}x{dv}",
                "q": f"{stages} x {rows}x{d}",
                "do": (kernel == "dk" and piece) or f"{1 if kernel == 'dk' else stages} x {rows}x{dv}",
            }
        ),
    }
    return Estimate(
        buffers=tuple(
            Buffer(name=name, shape=shapes[name], bytes=size)
            for name, size in plan.shared_memory(config, kernel).items()
        ),
        registers=plan.registers(config, kernel),
    )
