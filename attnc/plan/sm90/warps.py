"""Decoding on Hopper by warps that have keys of their own (`warp_split = kv`), and convert them in registers.

wgmma reads tiles of 16 bits, for 64 rows. Where a call has few rows and its keys are of 8 bits, writing and
reading such tiles takes longer than memory takes to bring the numbers. Here a block has 16 rows, and each of
its four warps 32 keys of every tile: a warp copies them as they lie in memory, waits for its own copies, and
reads them by ldmatrix as fragments of mma.sync, which take 16 numbers of 8 bits a lane and instruction. It
converts these (exactly, as `sm90.narrow` says) and multiplies, under a maximum of its own; so it waits for no
other warp. At the end the block adds what its warps have, as splits are added.

Four neighbours of a row of K are those of one lane, where mma wants pairs; so are those of q, which the sum
over columns does not see. Of V a matrix of pairs, transposed, has the even columns of two keys, and the odd
ones: o gets its order back where it is stored. Keys and values of 16 bits have the same kernel, with the same
order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from attnc.diagnostics import Diagnostic
from attnc.model.attention import Variant
from attnc.model.configs import configs
from attnc.model.schedule import HopperConfig, Schedule, TileConfig, Value
from attnc.plan.fitting import Tiles, nothing_fits, remedy, several_values, unsupported
from attnc.plan.layout import Buffer, Estimate
from attnc.plan.signature import feature
from attnc.plan.sm80.layout import GRANULE, MMA, UNALIGNED_ROWS
from attnc.plan.sm90.decode import check_decode_knobs, sm90_decode_layout
from attnc.plan.sm90.decode_layout import Sm90DecodeLayout
from attnc.plan.sm90.layout import FREE_REGISTERS, beyond_shared_memory, hopper
from attnc.plan.sm90.narrow import CONVERTING_WARPS, copy_as_stored

#: Rows of a tile, keys of a warp, blocks on a multiprocessor, columns that a thread has registers for.
ROWS, WARP_KEYS, BLOCKS, MOST_COLUMNS = 16, 32, 3, 128
#: What a block reads alone, of what a multiprocessor can; measured on an H200.
BLOCK_SHARE = 0.4
#: Registers of a thread, as such blocks leave it; floats between rows of sums; bytes of a barrier.
_REGISTERS, _PADDING, _BARRIER = 168, 4, 8
#: What a schedule gets for the keys that it does not mention.
_TILES = Tiles(tile_q=ROWS, tile_kv=CONVERTING_WARPS * WARP_KEYS, warps=CONVERTING_WARPS, stages=3)
_REMEDIES: Mapping[str, Sequence[Value]] = {
    "tile.q": (ROWS,),
    "tile.kv": (CONVERTING_WARPS * WARP_KEYS,),
    "warps": (CONVERTING_WARPS,),
    "stages": (3, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90WarpsLayout(Sm90DecodeLayout):
    """As for `Sm90DecodeLayout`. narrow: what is copied as it lies in memory: k and v, of 8 bits or 16."""

    @property
    def by_warps(self) -> bool:
        return True

    @property
    def blocks(self) -> int:
        return BLOCKS

    def chosen(self, config: TileConfig) -> dict[str, int]:
        return {"RAW_TILES": config.stages}

    def ahead(self, config: TileConfig) -> int:
        return config.stages

    def registers_of(self, consumers: int) -> tuple[int, int]:
        return _REGISTERS, _REGISTERS

    def threads(self, config: TileConfig) -> int:
        return 32 * CONVERTING_WARPS

    @property
    def entry_registers(self) -> int:
        return _REGISTERS

    def _barriers(self, config: TileConfig, ahead: int) -> dict[str, int]:
        return {"rows": ahead * self.narrow.barriers}

    def _buffers(self, config: TileConfig, ahead: int) -> dict[str, int]:
        parts = CONVERTING_WARPS * config.tile_q * (self.dv_multiplied + _PADDING + 2) * 4
        tiles = ahead * self.narrow.tile_bytes(config.tile_kv) + self.narrow.scale_bytes(config.tile_kv)
        return {
            "tiles": max(tiles, parts),
            "barriers": _BARRIER * sum(self._barriers(config, ahead).values()),
        }

    def registers(self, config: TileConfig) -> dict[str, int]:
        return {
            "q": self.d_multiplied // 4,
            "acc": self.dv_multiplied // 2,
            "s": WARP_KEYS // 2,
            "p": WARP_KEYS // 4,
        }


def has_keys_of_warps(schedule: Schedule) -> bool:
    """Returns whether the warps of a decode kernel share out keys."""
    knob = schedule.forward.get("warp_split")
    return schedule.is_decode and knob is not None and "kv" in knob.choices


def check_warps(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields reasons why such a kernel cannot be compiled, besides those that hold for all of the target."""
    attention, knobs = variant.attention, schedule.forward
    if attention.v.storage.is_part:
        label, instead = "each warp would need them twice", "write 'warp_split = q', or remove it"
        yield unsupported(
            "warp_split = kv has no values that are in the keys", attention.v.storage.span, label, instead
        )
    for tensor in (attention.v, attention.q):
        size = feature(tensor)
        if size % GRANULE or size > MOST_COLUMNS:
            yield unsupported(
                f"the head dimension {size} is more than {MOST_COLUMNS}"
                if size > MOST_COLUMNS
                else f"the head dimension {size} is not a multiple of {GRANULE}",
                tensor.span,
                "where warp_split = kv, a warp has all columns" if size > MOST_COLUMNS else UNALIGNED_ROWS,
                "write 'warp_split = q', or remove it" if size > MOST_COLUMNS else "pad the last axis",
            )
            break
    if attention.epilogue is not None:
        label, instead = "a warp has columns of o of all rows", "write 'warp_split = q', or remove it"
        yield unsupported("warp_split = kv has no epilogue", attention.epilogue.span, label, instead)
    split = knobs["warp_split"]
    if attention.softmax.form != "softmax":
        label, instead = (
            "maxima of warps are joined for softmax alone",
            "write 'warp_split = q', or remove it",
        )
        yield unsupported(
            f"warp_split = kv has no 'normalize = {attention.softmax.form}'", split.span, label, instead
        )
    if len(split.choices) > 1:
        yield several_values(split)
    yield from check_decode_knobs({key: knob for key, knob in knobs.items() if key != "warp_split"}, schedule)


def sm90_warps_layout(variant: Variant, schedule: Schedule) -> Sm90WarpsLayout:
    """Returns the layout that all configs of a schedule share."""
    common = sm90_decode_layout(variant, schedule)
    given = {field.name: getattr(common, field.name) for field in fields(common)}
    tensors = variant.attention.k, variant.attention.v
    narrow = copy_as_stored(variant.attention, tensors)
    own = {"warp_split": "kv", "consumers": 1, "shares": False, "narrow": narrow}
    return Sm90WarpsLayout(**{**given, **own})


def sm90_warps_configs(variant: Variant, schedule: Schedule) -> tuple[HopperConfig, ...]:
    """Returns the configs that can run, in their order. Raises DiagnosticError (E0601) when there is none."""
    knobs, layout = schedule.forward, sm90_warps_layout(variant, schedule)
    found = (hopper(config) for config in configs(schedule, "forward", variant))
    candidates = tuple(
        dict.fromkeys(
            replace(_TILES.without(knobs).of(config), consumers=1, registers=_REGISTERS) for config in found
        )
    )
    reasons = [warps_misfit(config, layout) for config in candidates]
    kept = tuple(config for config, reason in zip(candidates, reasons, strict=True) if reason is None)
    if not kept:
        hints = remedy(candidates[0], _REMEDIES, lambda config: warps_misfit(config, layout))
        raise nothing_fits(schedule, "forward", reasons[0] or "", where=schedule.target, hints=hints)
    return kept


def warps_misfit(config: HopperConfig, layout: Sm90WarpsLayout) -> str | None:
    """Returns why the config cannot run; None if it can."""
    for key, size, needed, why in (
        ("tile.q", config.tile_q, ROWS, "the rows of an mma"),
        ("warps", config.warps, CONVERTING_WARPS, "each with keys of its own"),
        ("tile.kv", config.tile_kv, CONVERTING_WARPS * WARP_KEYS, f"{WARP_KEYS} for each warp"),
    ):
        if size != needed:
            return f"{key} = {size} is not {needed}, where warp_split = kv: {why}"
    if config.stages < 2:
        return "stages = 1 leaves nothing to copy ahead: two at least"
    return beyond_shared_memory(layout.shared_memory(config), layout.room)


def warps_registers(layout: Sm90WarpsLayout, config: TileConfig) -> dict[str, int]:
    """Registers of a thread by value, and an allowance for the rest."""
    return {**layout.registers(config), "other": FREE_REGISTERS}


def warps_estimate(layout: Sm90WarpsLayout, config: TileConfig) -> Estimate:
    """Returns what a block takes: shared memory exactly, registers as far as the plan knows."""
    sizes, narrow = layout.shared_memory(config), layout.narrow
    scales = f", {config.tile_kv}x{narrow.scales} scales" if narrow.scales else ""
    shapes = {
        "tiles": f"{config.stages} x {config.tile_kv}x{layout.narrow.panels * 128} bytes{scales}",
        "barriers": str(sum(layout.barriers(config).values())),
    }
    return Estimate(
        buffers=tuple(Buffer(name=name, shape=shapes[name], bytes=size) for name, size in sizes.items()),
        registers=warps_registers(layout, config),
    )


def warps_roles(layout: Sm90WarpsLayout, config: TileConfig) -> Iterator[str]:
    """Yields what the warps of a block do."""
    yield f"roles: of {layout.threads(config)} threads"
    paged = f", {layout.box(config.tile_kv)} at once" if layout.page else ""
    how = "row by row by cp.async" if layout.copies == "rows" else f"by TMA{paged}"
    what = f"copy {WARP_KEYS} keys of a tile each {how}, and multiply them by mma.sync, {MMA} columns deep"
    yield f"  {CONVERTING_WARPS} warps   {_REGISTERS:3} registers a thread: {what}"
    yield f"  {sum(layout.barriers(config).values())} mbarriers: of rows that are there"
