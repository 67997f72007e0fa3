"""Which configs of a backward the CUDA kernels can run, and whether their warps share keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from attnc.diagnostics import Diagnostic
from attnc.model.attention import Attention, Variant
from attnc.model.configs import configs
from attnc.model.dtypes import DType
from attnc.model.schedule import BackwardConfig, Knob, Schedule, TileConfig
from attnc.plan.device import devices_from
from attnc.plan.fitting import (
    SIZES,
    Tiles,
    backward_phase_of,
    first_fitting,
    nothing_fits,
    remedy,
    several_values,
    unsupported,
)
from attnc.plan.gradients import find_score_inputs
from attnc.plan.layout import Buffer, Estimate, KernelName
from attnc.plan.signature import feature, normalise
from attnc.plan.sm80.forward import REMEDIES
from attnc.plan.sm80.layout import (
    LATENT_ROWS,
    MMA,
    SHARED_KEYS,
    CudaBackwardLayout,
    CudaLayout,
    over_rows,
)
from attnc.plan.sm80.listed import adapt, block_of, cuts_blocks, name_block
from attnc.plan.sticks import BY_PHASE, with_common_keys

#: A warp draws which elements dropout keeps for at most so many columns at a time.
_DRAWN = 128
#: Columns of dk and dv up to which a warp keeps those of 32 keys for itself.
_NARROW = 128
#: Columns up to which a block holds those of a gradient.
_WIDEST = 256
#: Accumulators, scores and their gradients take most registers of a thread; the rest is addresses and
#: fragments in flight, of f32 in two parts.
_FREE_REGISTERS, _FREE_REGISTERS_F32 = 40, 52
_LIMIT = 255


def check_cuda_backward(knob: Knob) -> Iterator[Diagnostic]:
    """Yields what these kernels cannot honour of a key of the backward's phases."""
    span = knob.span
    if span is None:
        return
    match knob.key, knob.choices:
        case "warp_split" | "order", (_, _, *_):
            yield several_values(knob)
        case "tile.d", _:
            yield unsupported(
                "'tile.d' is not lowered to CUDA",
                span,
                "the layout of a CUDA kernel decides this",
                "remove it",
            )
        case "dp", (order, *rest) if rest or order != "early":
            yield unsupported(
                "dP comes before P is needed in a CUDA kernel",
                span,
                "p and ds are made in one pass over the scores, in their registers",
                "write 'dp = early', or remove it",
            )


def refuse_latent_gradients(attention: Attention) -> str:
    """Returns why there are no kernels for gradients of a normalised attention whose values are columns of
    its keys; "" where there are.
    """
    if attention.softmax.form not in ("softmax", "softpick"):
        return "these kernels make p from the score and lse"
    if attention.element is DType.F32:
        return "these kernels multiply 16-bit numbers"
    if feature(attention.v) % MMA:
        return f"products take values by {MMA} columns, and there are {feature(attention.v)}"
    if set(attention.grads) - {"q", "k"}:
        return "these kernels make the gradients of q and k alone"
    return ""


def plan_cuda_backward(variant: Variant, schedule: Schedule, layout: CudaLayout) -> CudaBackwardLayout:
    """Returns how the kernels of a schedule lie. Warps share their keys where the schedule says `warp_split =
    q`, and where it says nothing and the rows of dk and dv are wide, or of f32 and dq is not summed in
    memory, or nothing else fits. Where one block cannot hold so many columns, several share them.
    """
    attention = variant.attention
    if layout.v_in_k:
        return CudaBackwardLayout(layout=layout, exchange=False, adds_dq=False, sums=False)
    default = configs(schedule, "dkdv", variant)[0]
    adds_dq = "q" in attention.grads and default.accumulate("q") != "two_pass"
    sums = bool(find_score_inputs(normalise(attention)))
    wide = not adds_dq if layout.is_f32 else layout.qk.width + layout.v.width > _NARROW
    said = schedule.phases["dkdv"].get("warp_split")
    orders = (wide, not wide) if said is None else (said.choices[0] == "q",)
    breaks_sticks = attention.softmax.form == "stick_breaking"  # whose sums over keys are those of warps
    plans = [
        CudaBackwardLayout(
            layout=layout,
            exchange=order,
            adds_dq=adds_dq,
            sums=sums,
            reads_rows=attention.normalises,
            breaks_sticks=breaks_sticks,
        )
        for order in ((False,) if breaks_sticks else orders)
    ]
    kernels: tuple[KernelName, ...] = ("dkdv",)
    widest_of_one = _NARROW if breaks_sticks else _WIDEST
    is_wide = max(layout.qk.width, layout.v.width) > widest_of_one or any(block_of(attention))
    if not (layout.is_f32 or adds_dq or sums) and is_wide:
        plans.append(replace(plans[0], exchange=False, sliced=True))
        kernels = ("dkdv", "dq")
    return next((x for x in plans if all(_fits(x, variant, schedule, y) for y in kernels)), plans[0])


def _fits(plan: CudaBackwardLayout, variant: Variant, schedule: Schedule, kernel: KernelName) -> bool:
    candidates = _candidates(plan, variant, schedule, kernel)
    return any(_misfit(config, plan, variant, kernel) is None for config in candidates)


def cuda_choices(
    plan: CudaBackwardLayout, variant: Variant, schedule: Schedule, kernel: KernelName
) -> tuple[BackwardConfig, ...]:
    """Returns the configs of one kernel that can run somewhere, in their order. Raises DiagnosticError
    (E0601) when there is none.
    """
    candidates = _candidates(plan, variant, schedule, kernel)
    reasons = [_misfit(config, plan, variant, kernel) for config in candidates]
    kept = tuple(config for config, reason in zip(candidates, reasons, strict=True) if reason is None)
    if kept and plan.breaks_sticks:
        fitting = {
            phase: [
                x.tile_kv
                for x in _candidates(plan, variant, schedule, of)
                if not _misfit(x, plan, variant, of)
            ]
            for phase, of in BY_PHASE.items()
        }
        kept = with_common_keys(kept, schedule, fitting)
    if not kept:
        hints = remedy(candidates[0], REMEDIES, lambda config: _misfit(config, plan, variant, kernel))
        said = schedule.phases[backward_phase_of(kernel)]
        reason = name_block(reasons[0] or "", block_of(variant.attention), said)
        raise nothing_fits(schedule, kernel, reason, where=schedule.target, hints=hints)
    return kept


def cuda_backward_estimate(plan: CudaBackwardLayout, config: TileConfig, kernel: KernelName) -> Estimate:
    """Returns what one block of threads takes: shared memory exactly, registers as far as the plan knows."""
    tile_q, tile_kv, stages = config.tile_q, config.tile_kv, config.stages
    d, dv = plan.layout.qk.width, plan.layout.v.width
    shapes = {
        "q": f"{tile_q}x{d}",
        "do": f"{tile_q}x{dv}",
        "k": f"{tile_kv}x{d}",
        "v": f"{tile_kv}x{dv}",
        "p": f"{tile_kv}x{tile_q}",
        "ds": f"{tile_kv}x{tile_q}",
        "rows": f"{stages} x 2x{tile_q}",
        "sums": "other gradients",
        "sticks": f"2x{config.warps}x{tile_q}",
    }
    streamed = ("k", "v") if over_rows(kernel) else ("q", "do")
    buffers = tuple(
        Buffer(
            name=name, shape=f"{stages} x {shapes[name]}" if name in streamed else shapes[name], bytes=size
        )
        for name, size in plan.shared_memory(config, kernel).items()
    )
    return Estimate(buffers=buffers, registers=_registers(plan, config, kernel))


def _registers(plan: CudaBackwardLayout, config: TileConfig, kernel: KernelName) -> dict[str, int]:
    other = _FREE_REGISTERS_F32 if plan.layout.is_f32 else _FREE_REGISTERS
    return {**plan.registers(config, kernel), "other": other}


def _candidates(
    plan: CudaBackwardLayout, variant: Variant, schedule: Schedule, kernel: KernelName
) -> tuple[BackwardConfig, ...]:
    found = configs(schedule, backward_phase_of(kernel), variant)
    if plan.breaks_sticks:
        return _stick_candidates(plan, variant, schedule, kernel)
    block, knobs = block_of(variant.attention), schedule.phases[backward_phase_of(kernel)]

    def misfit(config: BackwardConfig) -> str | None:
        return _misfit(config, plan, variant, kernel)

    def adapted(config: BackwardConfig) -> BackwardConfig:
        return adapt(config, block, knobs, misfit)

    if set(SIZES) & knobs.keys():
        return tuple(dict.fromkeys(map(adapted, found))) if any(block) else found
    tried = first_fitting(found, [_sizes(plan, variant, kernel)], misfit, adapted)
    return tuple(dict.fromkeys(tried)) if any(block) else tried


#: Keys of a tile of stick-breaking's gradients, the most first; rows of one, by whether queries or keys stay.
_STICK_KEYS, _STICK_ROWS = (64, 32, 16), {True: (64, 32), False: (64, 32, 16)}


def _stick_candidates(
    plan: CudaBackwardLayout, variant: Variant, schedule: Schedule, kernel: KernelName
) -> tuple[BackwardConfig, ...]:
    """Returns configs of stick-breaking with the most keys of a tile that both kernels have room for. A warp
    has 16 rows or keys.
    """

    def with_keys(keys: int, of: KernelName) -> tuple[BackwardConfig, ...]:
        phase = backward_phase_of(of)
        tiles = (
            Tiles(rows, keys, (rows if over_rows(of) else keys) // MMA, stages).without(
                schedule.phases[phase]
            )
            for rows in _STICK_ROWS[over_rows(of)]
            for stages in (2, 1)
        )
        return tuple(
            dict.fromkeys(x.of(config) for x in tiles for config in configs(schedule, phase, variant))
        )

    def fits(keys: int, of: KernelName) -> bool:
        return any(_misfit(config, plan, variant, of) is None for config in with_keys(keys, of))

    common = (keys for keys in _STICK_KEYS if all(fits(keys, of) for of in BY_PHASE.values()))
    return with_keys(next(common, _STICK_KEYS[-1]), kernel)


def _sizes(plan: CudaBackwardLayout, variant: Variant, kernel: KernelName) -> tuple[Tiles, ...]:
    widest = max(feature(variant.attention.q), feature(variant.attention.v))
    kind = "dq" if over_rows(kernel) else "all" if plan.adds_dq else "dkdv"
    if plan.sliced:
        return _SLICED_TILES[kind]
    if plan.layout.v_in_k:
        return next(sizes for widths, sizes in _LATENT_TILES if widest <= widths)
    table = (_F32_TILES if plan.layout.is_f32 else _TILES)[kind]
    sizes = next(sizes for widths, sizes in table if widest <= widths)
    # Other gradients than those of q, k and v need the registers of the largest tiles.
    return sizes[1:] if kind == "dq" and plan.sums else sizes


#: Columns of q or v up to which, and tiles: the fastest on an H200 first, the last
#: for less shared memory. A warp with 32 rows or keys reads every operand half as often as one with 16, and
#: the bandwidth of shared memory is what bounds these kernels.
_TILES: dict[str, tuple[tuple[float, tuple[Tiles, ...]], ...]] = {
    "dq": (
        (64, (Tiles(128, 64, 4, 2), Tiles(128, 32, 4, 2), Tiles(64, 64, 4, 1))),
        (128, (Tiles(128, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 1))),
        (math.inf, (Tiles(128, 48, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 1))),
    ),
    "dkdv": (
        (64, (Tiles(32, 128, 4, 2), Tiles(32, 128, 4, 3), Tiles(32, 128, 4, 1))),
        (128, (Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 1))),
        (math.inf, (Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 1))),
    ),
    "all": (
        (64, (Tiles(32, 128, 4, 2), Tiles(32, 128, 4, 1))),
        (128, (Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 1))),
        (math.inf, (Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 1))),
    ),
}
#: The same where several blocks share the columns: the last for less shared memory.
_SLICED_TILES: dict[str, tuple[Tiles, ...]] = {
    "dq": (Tiles(64, 32, 4, 1), Tiles(64, 16, 4, 1), Tiles(32, 16, 2, 1)),
    "dkdv": (Tiles(32, 64, 4, 1), Tiles(32, 32, 2, 1), Tiles(16, 32, 2, 1)),
}
#: The same where values are in the keys, in both kernels.
_LATENT_TILES: tuple[tuple[float, tuple[Tiles, ...]], ...] = (
    (128, (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 1))),
    (256, (Tiles(64, 64, 8, 1), Tiles(32, 64, 8, 1), Tiles(32, 32, 4, 1))),
    (math.inf, (Tiles(32, 64, 8, 2), Tiles(32, 64, 8, 1))),
)
#: The same of f32, whose rows take twice the room and whose operands twice the registers.
_F32_TILES: dict[str, tuple[tuple[float, tuple[Tiles, ...]], ...]] = {
    "dq": ((math.inf, (Tiles(128, 64, 8, 1), Tiles(64, 32, 4, 1))),),
    "dkdv": (
        (64, (Tiles(64, 128, 8, 2), Tiles(32, 64, 4, 2))),
        (128, (Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 1), Tiles(32, 128, 8, 1), Tiles(32, 32, 2, 1))),
        (math.inf, (Tiles(64, 32, 4, 1),)),
    ),
    "all": (
        (64, (Tiles(32, 64, 4, 1),)),
        (128, (Tiles(32, 128, 8, 2), Tiles(32, 128, 8, 1), Tiles(16, 64, 4, 1))),
        (math.inf, (Tiles(64, 32, 4, 1),)),
    ),
}


def _misfit(config: TileConfig, plan: CudaBackwardLayout, variant: Variant, kernel: KernelName) -> str | None:
    tile_q, tile_kv, warps = config.tile_q, config.tile_kv, config.warps
    parts = 1 if over_rows(kernel) and not plan.layout.v_in_k else plan.parts(config, kernel)
    if tile_q & (tile_q - 1) or tile_q < MMA:
        return f"tile.q = {tile_q} is not a power of two from {MMA} on"
    if tile_kv % MMA:
        return f"tile.kv = {tile_kv} is not a multiple of {MMA}"
    if cut := cuts_blocks(config, block_of(variant.attention)):
        return cut
    if plan.layout.v_in_k:
        if reason := _latent_misfit(config, plan, kernel):
            return reason
    elif over_rows(kernel):
        if tile_q % (MMA * warps):
            return f"tile.q = {tile_q} is not a multiple of {MMA * warps}, 16 rows for each of {warps} warps"
    elif plan.exchange:
        if parts < 2 or warps % parts or tile_kv * parts != SHARED_KEYS * warps:
            return f"tile.kv = {tile_kv} is not shared by {warps} warps, {SHARED_KEYS} keys each"
        if tile_q % (MMA * parts):
            return f"tile.q = {tile_q} is not a multiple of {MMA * parts}, 16 for each of {parts} warps"
    elif tile_kv % (MMA * warps):
        return f"tile.kv = {tile_kv} is not a multiple of {MMA * warps}, 16 keys for each of {warps} warps"
    columns = tile_kv if over_rows(kernel) else tile_q // max(parts, 1)
    if variant.attention.softmax.dropout is not None and columns > _DRAWN:
        return f"dropout draws for at most {_DRAWN} columns at a time"
    if max(plan.layout.qk.chunks, plan.layout.v.chunks) > 32 * warps:
        return f"{32 * warps} threads are fewer than the {plan.layout.chunk}-element pieces of a row"
    registers = sum(_registers(plan, config, kernel).values())
    if registers > _LIMIT:
        return f"needs about {registers} registers a thread; the limit is {_LIMIT}"
    buffers = plan.shared_memory(config, kernel)
    most = max(device.shared_per_block for device in devices_from(plan.layout.arch))
    if sum(buffers.values()) > most:
        named = " + ".join(f"{name} {size}" for name, size in buffers.items())
        return f"needs {sum(buffers.values())} B of shared memory ({named}); the limit is {most} B"
    return None


def _latent_misfit(config: TileConfig, plan: CudaBackwardLayout, kernel: KernelName) -> str | None:
    rows, columns = (config.tile_q, config.tile_kv)[:: 1 if over_rows(kernel) else -1]
    parts, names = plan.parts(config, kernel), ("tile.q", "tile.kv")[:: 1 if over_rows(kernel) else -1]
    if parts < 1 or LATENT_ROWS * config.warps != parts * rows:
        return f"{names[0]} = {rows} is not shared by {config.warps} warps, {LATENT_ROWS} rows each"
    if columns % (MMA * parts):
        return f"{names[1]} = {columns} is not a multiple of {MMA * parts}, {MMA} for each of {parts} warps"
    return None
