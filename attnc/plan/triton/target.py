"""The target `triton`: which configs its kernels can run, as far as the estimates tell. Its compiler lays out
registers and shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import gcd
from typing import ClassVar

from attnc.diagnostics import Diagnostic, DiagnosticError
from attnc.expr.nodes import Const
from attnc.model.attention import Attention, Variant
from attnc.model.configs import configs
from attnc.model.dtypes import DType
from attnc.model.schedule import BackwardConfig, ForwardConfig, Knob, Phase, Schedule, TileConfig
from attnc.plan.access import A_QUARTER, SHORT_LOOPS, Section
from attnc.plan.device import DEVICES, Device
from attnc.plan.fitting import (
    SIZES,
    C,
    Tiles,
    TileShape,
    backward_phase_of,
    choices,
    decode_tiles,
    first_fitting,
    nothing_fits,
    remedy,
    unsupported,
)
from attnc.plan.ir import Module
from attnc.plan.joined import joins_rows
from attnc.plan.layout import BackwardLayout, Estimate, KernelName, Layout, SharedBytes, Which
from attnc.plan.lists import adds_to_keys, fit_blocks, listing_of, selects_keys
from attnc.plan.signature import feature
from attnc.plan.sticks import BY_PHASE, with_common_keys
from attnc.plan.target import Target
from attnc.plan.triton import resources
from attnc.plan.triton.resources import Rejection, estimate, misfit

#: Of what a multiprocessor can read, what a block reads alone that converts keys and values of 8 bits: 20
#: GB/s of 33 on an H200.
NARROW_BLOCK_SHARE = 0.6
#: What a backward kernel tries where its schedule names none of these keys, in this order.
_SMALLER: tuple[Tiles, ...] = (
    Tiles(),
    Tiles(stages=1),
    Tiles(32, 32),
    Tiles(32, 32, stages=1),
    Tiles(16, 16, stages=1),
)
#: What a forward kernel tries where its schedule leaves these keys open and the usual sizes fit no device:
#: large tiles first, the last for less shared memory.
_WIDE: tuple[tuple[Tiles, ...], ...] = (
    (Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
    (Tiles(32, 32, 8, 1), Tiles(16, 16, 4, 1)),
)
#: Columns of q or v up to which a backward kernel of f32 tries these first: tile.q, tile.kv, warps, stages;
#: the fastest on an H200 first, the last for less shared memory.
_F32_TILES: Mapping[str, Mapping[int, tuple[Tiles, ...]]] = {
    "dq": {
        64: (Tiles(128, 64, 8, 1), Tiles(64, 32, 4, 1), Tiles(16, 16, 4, 1)),
        128: (Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
    },
    "dkdv": {
        64: (Tiles(32, 128, 8, 2), Tiles(32, 64, 4, 1), Tiles(16, 16, 4, 1)),
        128: (Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
    },
}
#: What kernels try first where every query selects keys, up to `_WIDEST` columns: the heads of one query are
#: few, and so are those of several queries that select a block. The fastest on an H200 first.
_SELECTED: Mapping[Phase, tuple[Tiles, ...]] = {
    "forward": (Tiles(16, 64, 4, 3), Tiles(16, 64, 4, 2)),
    "dq": (Tiles(16, 64, 4, 2), Tiles(16, 64, 4, 3)),
    "dkdv": (Tiles(32, 64, 4, 2), Tiles(32, 64, 4, 3)),
}
#: What it tries first beyond `_WIDEST` columns of q or v, as `_WIDE`.
_WIDE_BACKWARD: Mapping[str, tuple[tuple[Tiles, ...], ...]] = {
    "dq": ((Tiles(64, 32, 8, 1), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),),
    "dkdv": ((Tiles(32, 64, 8, 1), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),),
}
_WIDEST = 256
#: The same for latents of which queries select keys, and whose K/V head has 16 query heads or fewer.
_FEW_HEADS = Tiles(16, 64, 4, 2)
_SIZES = frozenset(SIZES)
_SMALLER_KEYS = {key for tiles in _SMALLER for key in tiles.by_key()}
#: Tried in this order to say what would fit, the smallest change of each knob first.
_CHANGES: Mapping[str, tuple[int, ...]] = {
    "tile.kv": (128, 64, 32, 16),
    "stages": (4, 3, 2, 1),
    "tile.q": (128, 64, 32, 16),
    "warps": (8, 16),
}


def triton_configs(variant: Variant, schedule: Schedule) -> tuple[ForwardConfig, ...]:
    """Returns the configs of a forward or decode kernel that run on some device, in their order. Raises
    DiagnosticError (E0601) when there is none.
    """
    found = configs(schedule, "forward", variant)
    if not _SIZES & schedule.forward.keys():
        first = _selected_tiles(variant.attention, schedule, "forward")
        found = first_fitting(found, first, lambda config: _misfit(config, variant, "forward"))
    if not any(_misfit(config, variant, "forward") is None for config in found):
        knobs = schedule.phases["forward"]
        groups = ([tiles.without(knobs) for tiles in group] for group in _WIDE)
        found = tuple(dict.fromkeys(first_fitting(found, groups, lambda x: _misfit(x, variant, "forward"))))
    found = fit_blocks(found, variant, schedule, "forward")
    return portable(found, variant, schedule)


def triton_backward_configs(
    variant: Variant, schedule: Schedule, kernel: KernelName
) -> tuple[BackwardConfig, ...]:
    """Returns the configs of a kernel of a backward that run on some device, in their order. Raises
    DiagnosticError (E0601) when there is none.
    """
    found = _list_backward_configs(variant, schedule, kernel)
    if variant.attention.softmax.form == "stick_breaking":
        found = _with_common_keys(found, variant, schedule)
    return portable(
        fit_blocks(found, variant, schedule, backward_phase_of(kernel)), variant, schedule, kernel
    )


def _list_backward_configs(
    variant: Variant, schedule: Schedule, kernel: KernelName
) -> tuple[BackwardConfig, ...]:
    phase = backward_phase_of(kernel)
    found = configs(schedule, phase, variant)
    if not _SMALLER_KEYS & schedule.phases[phase].keys():
        attention = variant.attention
        first = (
            *_selected_tiles(attention, schedule, phase),
            *_f32_tiles(attention, phase),
            *_wide_tiles(attention, phase),
        )
        groups = (*first, *((tiles,) for tiles in _SMALLER))
        found = first_fitting(found, groups, lambda config: _misfit(config, variant, kernel))
    return found


def _with_common_keys(
    found: tuple[BackwardConfig, ...], variant: Variant, schedule: Schedule
) -> tuple[BackwardConfig, ...]:
    sizes = {
        phase: [
            config.tile_kv
            for config in _list_backward_configs(variant, schedule, of)
            if _misfit(config, variant, of) is None
        ]
        for phase, of in BY_PHASE.items()
    }
    return with_common_keys(found, schedule, sizes) or tuple(
        Tiles(16, 16, stages=1).of(config) for config in found[:1]
    )


def _selected_tiles(attention: Attention, schedule: Schedule, phase: Phase) -> Iterator[tuple[Tiles, ...]]:
    if not selects_keys(attention, schedule) or _widest(attention) > _WIDEST:
        return
    listing = listing_of(attention)
    assert listing is not None, "a list selects them"
    keys = listing.keys if phase == "dkdv" and not listing.gathers else 0
    yield tuple(replace(tiles, tile_kv=gcd(tiles.tile_kv or 0, keys)) for tiles in _SELECTED[phase])


def _f32_tiles(attention: Attention, phase: Phase) -> Iterator[tuple[Tiles, ...]]:
    if DType(attention.q.dtype) is DType.F32:
        widest = _widest(attention)
        groups = (group for columns, group in _F32_TILES[phase].items() if widest <= columns)
        yield from islice(groups, 1)


def _wide_tiles(attention: Attention, phase: Phase) -> tuple[tuple[Tiles, ...], ...]:
    if _widest(attention) <= _WIDEST:
        return ()
    tiles = _WIDE_BACKWARD[phase]
    if phase == "dq" and joins_rows(attention) and adds_to_keys(attention):
        large, *smaller = tiles[0]  # products stay in registers, which leaves room for the next tile of keys
        first = _FEW_HEADS if _has_few_heads(attention) else replace(large, stages=2)
        tiles = ((first, large, *smaller), *tiles[1:])
    return tiles


def _has_few_heads(attention: Attention) -> bool:
    match attention.q.shape[-2], attention.k.shape[-2]:
        case Const(value=heads), Const(value=kv_heads):
            return heads <= 16 * kv_heads
        case _:
            return False


def _widest(attention: Attention) -> int:
    return max(feature(attention.q), feature(attention.v))


def portable(
    found: Iterable[C], variant: Variant, schedule: Schedule, kernel: Which = "forward"
) -> tuple[C, ...]:
    """Selects the configs that run on some device, in their order. Raises DiagnosticError (E0601) when there
    is none.
    """
    candidates = tuple(found)
    kept = tuple(config for config in candidates if _misfit(config, variant, kernel) is None)
    if not kept:
        raise _nothing_fits(candidates, variant, schedule, kernel)
    return kept


def _misfit(config: TileConfig, variant: Variant, kernel: Which) -> Rejection | None:
    reason: Rejection | None = None
    for device in DEVICES.values():
        reason = misfit(config, variant, device, kernel)
        if reason is None:
            break
    return reason


def _nothing_fits(
    found: Iterable[TileConfig], variant: Variant, schedule: Schedule, kernel: Which
) -> DiagnosticError:
    device = max(DEVICES.values(), key=lambda device: device.shared_per_block)
    rejections = [r for config in found if (r := misfit(config, variant, device, kernel)) is not None]
    best = min(rejections, key=lambda rejection: rejection.excess)
    needs = estimate(best.config, variant, device, kernel)
    buffers = " + ".join(f"{buffer.name} {buffer.shape}" for buffer in needs.buffers)
    return nothing_fits(
        schedule,
        kernel,
        str(best),
        where="any GPU",
        notes=[f"{buffers}, {variant.attention.q.dtype}, {variant.name}"],
        hints=([best.instead] if best.instead else [])
        or _nearest(best.config, variant, device, kernel)
        or remedy(best.config, _CHANGES, lambda config: misfit(config, variant, device, kernel)),
    )


def _nearest(config: TileConfig, variant: Variant, device: Device, kernel: Which) -> list[str]:
    fitting = []
    for key, values in _CHANGES.items():
        for value in values:
            if not _is_smaller(key, value, config):
                continue
            changed = config.with_keys({key: value})
            if misfit(changed, variant, device, kernel) is None:
                fitting.append((key, value, changed))
                break
    if not fitting:
        small = Tiles(16, 16, stages=1).of(config)
        fits = misfit(small, variant, device, kernel) is None
        return ["'tile.q = 16, tile.kv = 16, stages = 1' fits"] if fits else []
    key, value, changed = max(fitting, key=lambda entry: estimate(entry[2], variant, device, kernel).shared)
    needs = estimate(changed, variant, device, kernel)
    return [f"'{key} = {value}' needs {needs.shared} B and about {needs.registers_per_thread} registers"]


def _is_smaller(key: str, value: int, config: TileConfig) -> bool:
    now = config.value(key)
    assert isinstance(now, int), "keys of numbers alone"
    return value > now if key == "warps" else value < now


#: Keys that decide what the kernel looks like, rather than the sizes that it is launched with.
_STRUCTURE = ("loops", "softmax", "persistent", "order", "pack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Triton(Target):
    family: ClassVar = "triton"
    cuts_edges: ClassVar = True
    always_fills: ClassVar = True
    has_backward: ClassVar = True
    has_f32_dq: ClassVar = True
    lists_kept_blocks: ClassVar = True
    decodes_packed_rows: ClassVar = True
    has_selected_gradients: ClassVar = True
    cuts_summands: ClassVar = True
    breaks_order: ClassVar = ""
    has_rows_kernel: ClassVar = False
    sections: ClassVar = A_QUARTER

    def backward_section(self, *, short_loops: bool, in_turns: bool) -> Section:
        return SHORT_LOOPS if short_loops else self.sections

    def splits_keys(self, layout: BackwardLayout | None, *, wide: bool) -> bool:
        return wide

    def block_share(self, attention: Attention, layout: Layout | None) -> float:
        is_narrow = any(DType(tensor.dtype).is_narrow for tensor in (attention.k, attention.v))
        return NARROW_BLOCK_SHARE if is_narrow else 1.0

    def reads_narrow(self, schedule: Schedule) -> bool:
        return True

    def instead_of_drawing(self, variant: Variant, schedule: Schedule) -> str:
        """Returns "" beside lists alone: the other kernels that decode draw nothing."""
        if listing_of(variant.attention) is None:
            return Target.instead_of_drawing(self, variant, schedule)
        return ""

    def differentiates_narrow(self, attention: Attention, schedule: Schedule) -> bool:
        return True

    def refuse_latent_gradients(self, attention: Attention) -> str:
        is_sum = attention.softmax.form == "none"
        return "" if not is_sum else "the factor of these weights is left to the end of a sum"

    def check(self, variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
        for knob in schedule.forward.values():
            yield from _knob(knob)

    def refuse_column_scale(self, attention: Attention, schedule: Schedule, name: str) -> tuple[str, ...]:
        return ()

    def check_backward(self, knob: Knob) -> Iterator[Diagnostic]:
        yield from _knob(knob)

    def default_schedule(self, shape: TileShape) -> Iterator[str]:
        yield from _default_schedule(shape)

    def default_steps(self, shape: TileShape, splits: str = "auto") -> Iterator[str]:
        yield f"loops = [kv], pack = gqa, split.kv = {splits}"
        yield f"tile.q = 16, tile.kv in {{{decode_tiles(shape)}}}, warps = 4, stages in {{3, 2, 1}}"

    def configs(self, variant: Variant, schedule: Schedule) -> tuple[ForwardConfig, ...]:
        return triton_configs(variant, schedule)

    def backward_configs(
        self, variant: Variant, schedule: Schedule, kernel: KernelName, layout: BackwardLayout | None
    ) -> tuple[BackwardConfig, ...]:
        return triton_backward_configs(variant, schedule, kernel)

    def count_shared_bytes(
        self, variant: Variant, config: TileConfig, kernel: Which, layout: Layout | BackwardLayout | None
    ) -> SharedBytes:
        return resources.room(config, variant, kernel)

    def count_staged_bytes(self, variant: Variant, config: TileConfig) -> int:
        return resources.count_staged_bytes(config, variant)

    def estimate(self, module: Module, config: TileConfig, kernel: Which, device: Device) -> Estimate:
        return resources.estimate(config, module.variant, device, kernel)


TRITON = Triton(name="triton", devices=tuple(DEVICES.values()))


def _knob(knob: Knob) -> Iterator[Diagnostic]:
    if knob.key in _STRUCTURE and len(knob.choices) > 1:
        yield unsupported(
            f"'{knob.key}' has one value in a Triton schedule",
            knob.span,
            "each value is a kernel of its own",
            f"write '{knob.key} = ...'",
        )
    for value in knob.choices:
        match knob.key, value:
            case "tile.q" | "tile.kv" | "warps", int(size) if size & (size - 1):
                yield unsupported(
                    f"Triton needs a power of two, not {size}", knob.span, f"'{knob.key}' cannot be {size}"
                )
            case "tile.kv", int(size) if size < 16:
                yield unsupported(
                    f"Triton multiplies tiles of 16 keys and more, not {size}", knob.span, "too few keys"
                )
            case "warp_split", "kv":
                yield unsupported(
                    "Triton lays out its own warps",
                    knob.span,
                    "split-K between warps cannot be asked for",
                    "use 'warp_split = q' here, or a CUDA target",
                )
            case "tile.d", _:
                yield unsupported(
                    "Triton keeps the head dimension whole", knob.span, "cannot be tiled", "remove it"
                )
            case _:
                continue
        return


def _default_schedule(shape: TileShape) -> list[str]:
    wide = shape.dtype == "f32"  # twice the memory, and three products for one
    width = shape.width * (2 if wide else 1)
    is_usual = shape.listed is None and not shape.segment and shape.form != "stick_breaking"
    if shape.width > _WIDEST and is_usual and not wide:  # the plan has the sizes
        sizes = [f"{key} = {value}" for key, value in shape.wanted.by_key().items()]
        backward = ["backward {", "  dq { order = longest_first }", "}"] if shape.gradients else []
        return ["loops = [q, kv], order = longest_first", *sizes, *backward]
    if width <= 64 and shape.form != "stick_breaking":
        first = Tiles(64, 128, 4, 2)
    elif width <= 128 and shape.form == "stick_breaking":
        first = Tiles(64, 64, 4, 2)
    elif width <= 128:
        first = Tiles(64 if shape.masked else 128, 64, 4, 2 + shape.masked)
    elif width <= 256:
        first = Tiles(64, 32, 4, 2) if wide else Tiles(128, 64, 8, 2)
    else:
        first = Tiles(32, 32, 4, 2)
    if shape.listed is not None and any(size & -size < _LEAST for size in shape.listed if size):
        gathered = shape.listed[1] & -shape.listed[1] < _LEAST
        rows = _LEAST if wide or shape.width > _WIDEST else _rows_of(shape.group)
        keys = replace(first if gathered else shape.divide(first), tile_q=rows)
        keys = _selected_latents(shape) if gathered and shape.width > _WIDEST and not wide else keys
        sizes = choices(keys, shape.wanted)
        splits = "" if shape.gradients or shape.form == "stick_breaking" else ", split.kv = auto"
        return [f"loops = [kv], pack = gqa{splits}", *sizes]
    tiles = choices(shape.divide(first), shape.wanted, one_shape=shape.segment > 0)
    lines = ["loops = [q, kv], order = longest_first", *tiles]
    if shape.gradients:
        lines += ["backward {", *(f"  {line}" for line in _default_backward(shape, width, wide)), "}"]
    return lines


#: Rows and keys of the smallest tile.
_LEAST = 16
#: Latents of 16 bits of which queries select keys: tiles for as many query heads as a K/V head has at least,
#: or for any number. The fastest on an H200; two stages of 64 rows leave an A100 room for no more keys.
_SELECTED_LATENTS = ((64, Tiles(64, 32, 8, 2)), (17, Tiles(32, 32, 4, 2)), (0, Tiles(16, 64, 4, 2)))


def _rows_of(group: int) -> int:
    """Returns the rows of a tile of the query heads that share keys, of one query: as many as read keys once,
    up to 64. 64 heads of 128 columns take a third of the time with 64 rows that they take with 16.
    """
    return min(max(1 << (group - 1).bit_length(), _LEAST), 64) if group else _LEAST


def _selected_latents(shape: TileShape) -> Tiles:
    return next(tiles for heads, tiles in _SELECTED_LATENTS if shape.group >= heads)


def _default_backward(shape: TileShape, width: int, wide: bool) -> list[str]:
    if width <= 128 and shape.form == "stick_breaking":  # sums over keys take registers
        dq = Tiles(64, 64, 4, 2)
        dkdv = Tiles(64, 64, 8, 2)
    elif width <= 64:
        dq = Tiles(64, 64, 4, 3)
        dkdv = Tiles(64, 64, 4, 2)
    elif width <= 128:
        dq = Tiles(128, 64, 8, 3)
        dkdv = Tiles(64, 64, 4, 2)
    elif width <= 256 and not wide:
        dq = Tiles(128, 32, 8, 3)
        dkdv = Tiles(32, 128, 8, 3)
    else:
        dq = dkdv = Tiles(32, 32, 4, 2)
    if shape.form == "stick_breaking" and dkdv.tile_kv != dq.tile_kv:
        dkdv = replace(dkdv, tile_q=64, tile_kv=dq.tile_kv)
    return [
        "dq {",
        "  order = longest_first",
        *(f"  {line}" for line in choices(shape.divide(dq))),
        "}",
        "dkdv {",
        *(f"  {line}" for line in choices(shape.divide(dkdv))),
        "}",
    ]
