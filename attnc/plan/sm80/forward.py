"""What the CUDA targets decide beyond the kernel's structure: the layout, and which configs can run.

A target `cuda.sm_80` means: this architecture and everything newer. The kernels use nothing but mma.sync,
ldmatrix and cp.async; `cuda.sm_90a` asks for wgmma and TMA, a family of kernels of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd

from attnc.diagnostics import Diagnostic
from attnc.model.attention import Variant
from attnc.model.configs import configs
from attnc.model.dtypes import DType
from attnc.model.schedule import Choice, ForwardConfig, Knob, Schedule, TileConfig, Value
from attnc.plan.device import devices_from
from attnc.plan.fitting import Tiles, first_fitting, nothing_fits, remedy, several_values, unsupported
from attnc.plan.layout import Buffer, Estimate
from attnc.plan.signature import feature
from attnc.plan.sm80.layout import GRANULE, MMA, UNALIGNED_ROWS, CudaLayout, Swizzle, chunk_of, round_up_depth
from attnc.plan.sm80.listed import adapt, block_of, cuts_blocks, name_block

PREFIX = "cuda."
#: Columns of o that split-K sums at once: as many as keep its buffer below the tiles' own size.
_EXCHANGE = 32
#: acc and s take most registers of a thread; the rest is addresses, statistics and fragments in flight, of
#: f32 in two parts.
_FREE_REGISTERS, _FREE_REGISTERS_F32 = 48, 60
#: What a schedule of f32, twice as wide, gets for the keys that it does not mention: the first that fits.
_F32_TILES: tuple[Tiles, ...] = (
    Tiles(128, 64, stages=1),
    Tiles(128, 32, stages=1),
    Tiles(None, 64, stages=1),
    Tiles(None, 32, stages=1),
    Tiles(32, 64, stages=1),
)
#: Decoding waits for memory: copies run ahead, and there are few rows.
_F32_DECODE_TILES: tuple[Tiles, ...] = (
    Tiles(),
    Tiles(tile_kv=32),
    Tiles(tile_kv=32, stages=1),
    Tiles(stages=1),
)
#: Columns of o that a warp can keep to itself for 16 rows, in 128 registers of a thread.
_WIDEST = 256
#: What a schedule gets for the keys that it does not mention where rows are wider, so that warps share the
#: keys: the last for less shared memory.
_WIDE_TILES: tuple[Tiles, ...] = (Tiles(32, 64, 4, 1), Tiles(16, 64, 4, 1), Tiles(16, 32, 2, 1))
#: The same of decoding, which has few rows, and copies ahead where there is room.
_WIDE_DECODE_TILES: tuple[Tiles, ...] = (Tiles(16, 64, 4, 2), *_WIDE_TILES[1:])


#: What makes a config fit where nothing of a schedule does: other shares for the warps, then other tiles.
REMEDIES: Mapping[str, Sequence[Value]] = {
    "warps": (2, 1, 8),
    "stages": (1,),
    "tile.kv": (32, 64, 16, 128),
    "tile.q": (64, 32, 16, 128),
}
_SPLIT: Mapping[str, Sequence[Value]] = {"warp_split": ("kv",)}


def check_cuda(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields every reason why these CUDA targets cannot compile this variant under this schedule."""
    attention = variant.attention
    if attention.o.dtype != attention.q.dtype:
        yield unsupported(
            f"o of {attention.o.dtype} from q of {attention.q.dtype} is not lowered to CUDA",
            attention.o.span,
            "it leaves through the memory of a tile of q, by the same copies",
            f"declare an output of {attention.q.dtype}, or use the target 'triton'",
        )
    for size, tensor in {feature(tensor): tensor for tensor in (attention.v, attention.q)}.items():
        if size % GRANULE:
            yield unsupported(
                f"the head dimension {size} is not a multiple of {GRANULE}",
                tensor.span,
                UNALIGNED_ROWS,
                "pad the last axis",
            )
    knobs = schedule.forward
    for key in ("loops", "warp_split", "softmax", "persistent", "order", "pack"):
        if key in knobs and len(knobs[key].choices) > 1:
            yield several_values(knobs[key])
    for knob in knobs.values():
        yield from _knob(knob)
    yield from _wide(variant, knobs)
    split = knobs.get("warp_split")
    if _breaks_sticks(variant) and split and "kv" in split.choices:
        label = "what a warp's keys take depends on what those of the next leave"
        message = "'warp_split = kv' has no 'normalize = stick_breaking'"
        yield unsupported(message, split.span, label, "write 'warp_split = q'")
    softmax = knobs.get("softmax")
    if softmax and split and "kv" in split.choices and Choice(name="two_pass", args={}) in softmax.choices:
        yield unsupported(
            "two passes are not lowered to CUDA where warps share the keys",
            softmax.span,
            "with warp_split = kv",
            "write 'warp_split = q', or 'softmax = online'",
        )


def _wide(variant: Variant, knobs: Mapping[str, Knob]) -> Iterator[Diagnostic]:
    widest = max(feature(tensor) for tensor in (variant.attention.q, variant.attention.v))
    softmax, split = knobs.get("softmax"), knobs.get("warp_split")
    unified = softmax and isinstance(softmax.choices[0], Choice) and softmax.choices[0].name == "unified_max"
    if softmax and unified and split and "kv" in split.choices and widest > _WIDEST:
        yield unsupported(
            f"a unified maximum needs a head dimension of at most {_WIDEST} where warps share the keys",
            softmax.span,
            f"it is {widest} here",
            "write 'softmax = online'",
        )


def _knob(knob: Knob) -> Iterator[Diagnostic]:
    for value in knob.choices:
        match knob.key, value:
            case "tile.d", _:
                yield unsupported(
                    "the head dimension stays whole in a CUDA kernel",
                    knob.span,
                    "cannot be tiled",
                    "remove it",
                )
            case _:
                continue
        return


def cuda_layout(variant: Variant, config: TileConfig, schedule: Schedule) -> CudaLayout:
    """Returns the layout that all configs of a schedule share."""
    decodes = schedule.is_decode
    d, dv = feature(variant.attention.q), feature(variant.attention.v)
    element = DType(variant.attention.q.dtype)
    v = Swizzle(width=round_up_depth(dv), chunk=chunk_of(element))
    split = config.warp_split
    return CudaLayout(
        arch=schedule.target.removeprefix(PREFIX),
        element=element,
        d=d,
        dv=dv,
        qk=Swizzle(width=round_up_depth(d), chunk=chunk_of(element)),
        v=v,
        warp_split=split,
        streamed="q" if config.loops == ("kv", "q") else "kv",
        exchange=gcd(_EXCHANGE, v.width) if split == "kv" else 0,
        v_in_k=variant.attention.v.storage.is_part,
        merge="end" if decodes and max(round_up_depth(d), v.width) <= _WIDEST else "step",
    )


def cuda_configs(variant: Variant, schedule: Schedule) -> tuple[ForwardConfig, ...]:
    """Returns the configs that can run somewhere, in their order. Raises DiagnosticError (E0601) when there
    is none.
    """
    candidates, knobs = configs(schedule, "forward", variant), schedule.forward
    block = block_of(variant.attention, schedule)

    def misfit(config: ForwardConfig) -> str | None:
        return cuda_misfit(config, variant, schedule)

    def adapted(config: ForwardConfig) -> ForwardConfig:
        return adapt(config, block, knobs, misfit)

    if variant.attention.q.dtype is DType.F32:
        groups = (
            (tiles.without(knobs),) for tiles in (_F32_DECODE_TILES if schedule.is_decode else _F32_TILES)
        )
        candidates = first_fitting(candidates, groups, misfit, adapted)
    elif any(block):
        candidates = tuple(dict.fromkeys(map(adapted, candidates)))
    if _may_share_keys(variant, schedule) and all(map(misfit, candidates)):
        shared = [replace(config, warp_split="kv") for config in candidates]
        wide = _WIDE_DECODE_TILES if schedule.is_decode else _WIDE_TILES
        group = [tiles.without(knobs) for tiles in wide]
        candidates = tuple(dict.fromkeys(first_fitting(shared, [group], misfit, adapted)))
    reasons = list(map(misfit, candidates))
    kept = tuple(config for config, reason in zip(candidates, reasons, strict=True) if reason is None)
    if not kept:
        is_split = "warp_split" in knobs or _breaks_sticks(variant)
        changes = REMEDIES if is_split else {**_SPLIT, **REMEDIES}
        hints = remedy(candidates[0], changes, misfit)
        reason = name_block(reasons[0] or "", block, knobs)
        raise nothing_fits(schedule, "forward", reason, where=schedule.target, hints=hints)
    return kept


def _may_share_keys(variant: Variant, schedule: Schedule) -> bool:
    knobs = schedule.forward
    is_wide = max(feature(variant.attention.q), feature(variant.attention.v)) > _WIDEST
    softmax = knobs.get("softmax")
    choice = None if softmax is None else softmax.choices[0]
    rescales = not isinstance(choice, Choice) or choice.name == "online"
    may_split = "warp_split" not in knobs and not _breaks_sticks(variant)
    return is_wide and may_split and rescales


def _breaks_sticks(variant: Variant) -> bool:
    return variant.attention.softmax.form == "stick_breaking"


def cuda_misfit(config: TileConfig, variant: Variant, schedule: Schedule) -> str | None:
    """Returns why no GPU of the target can run the config; None if one can."""
    layout = cuda_layout(variant, config, schedule)
    warps = layout.threads(config) // 32
    key, name = ("tile.q", "query rows") if layout.warp_split == "q" else ("tile.kv", "keys")
    for tile, size in (("tile.q", config.tile_q), ("tile.kv", config.tile_kv)):
        unit = MMA * warps if tile == key else MMA
        if size % unit:
            share = f", 16 {name} for each of {warps} warps" if tile == key else ""
            return f"{tile} = {size} is not a multiple of {unit}{share}"
    if reason := cuts_blocks(config, block_of(variant.attention, schedule)):
        return reason
    if max(layout.qk.chunks, layout.v.chunks) > layout.threads(config):
        return f"{layout.threads(config)} threads are fewer than the {layout.chunk}-element pieces of a row"
    registers, limit = sum(_registers(layout, config).values()), 255
    if registers > limit:
        return f"needs about {registers} registers a thread; the limit is {limit}"
    shared = sum(layout.shared_memory(config).values())
    most = max(device.shared_per_block for device in devices_from(layout.arch))
    if shared > most:
        parts = " + ".join(f"{name} {size}" for name, size in layout.shared_memory(config).items())
        return f"needs {shared} B of shared memory ({parts}); the limit is {most} B"
    return None


def cuda_estimate(layout: CudaLayout, config: TileConfig) -> Estimate:
    """Returns what one block of threads takes: shared memory exactly, registers as far as the plan knows."""
    shapes = {"q": layout.qk.width, "k": layout.qk.width, "v": layout.v.width}
    rows = {"q": config.tile_q, "k": config.tile_kv, "v": config.tile_kv}
    streamed = {"k", "v"} if layout.streamed == "kv" else {"q"}
    buffers = []
    for name, size in layout.shared_memory(config).items():
        stages = f"{config.stages} x " if name in streamed else ""
        shape = f"{stages}{rows[name]}x{shapes[name]}" if name in rows else "split-K"
        buffers.append(Buffer(name=name, shape=shape, bytes=size))
    return Estimate(buffers=tuple(buffers), registers=_registers(layout, config))


def _registers(layout: CudaLayout, config: TileConfig) -> dict[str, int]:
    other = _FREE_REGISTERS_F32 if layout.is_f32 else _FREE_REGISTERS
    return {**layout.registers(config), "other": other}
