"""Decoding on Hopper: which attentions can have it, and how its kernel lies on the machine.

A block has one tile of 64 rows (query, head), which the heads of a group and several tokens fill, and a
split of the keys. One warpgroup copies tiles of K and V by TMA, page by page where there are pages, or row by
row by cp.async where pages hold no boxes (`copies_of`); one or two others multiply by wgmma:

consumers = 1: it has all columns of o. Two blocks live on a multiprocessor, so that one reads memory while
    the other computes.
consumers = 2: each has half of the columns of o, which are too many for one, and they take turns in making
    probabilities: the first of the even tiles, the second of the odd ones. Each multiplies its own p, from
    registers, and the other's, from shared memory, by its columns of V. So one softmax runs beside the
    other's products (the "seesaw" of FlashMLA, github.com/deepseek-ai/FlashMLA). Heads of up to 512 columns
    have this kernel for prompts too.

Where a mask lists single keys, a list is a table of pages of one key: of those it names the kernel copies row
after row, and knows of no others.

Keys and values of 8 bits are converted by the warpgroup that copies them (`sm90.narrow`): what multiplies
reads tiles of 16 bits, and does not know of it. Beside the tiles of two warpgroups that multiply there is no
room for others, so there rows of 8 bits come by way of registers.

Where there are fewer blocks than multiprocessors, two blocks can share the columns of o (tile.d): both make
all probabilities, and each multiplies them by half of the columns of V, and stores half of what splits leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from attnc.diagnostics import Diagnostic
from attnc.expr.affine import at_least, shift
from attnc.expr.nodes import Index
from attnc.expr.simplify import substitute
from attnc.expr.solve import solve
from attnc.model.attention import Attention, Variant
from attnc.model.configs import configs
from attnc.model.dtypes import DType
from attnc.model.schedule import Choice, HopperConfig, Knob, Schedule, TileConfig, Value
from attnc.plan.device import DEVICES
from attnc.plan.fitting import Tiles, keys_of_split, nothing_fits, remedy, several_values, unsupported
from attnc.plan.layout import Buffer, Estimate
from attnc.plan.listed_rows import unites_blocks
from attnc.plan.lists import fit_blocks, lists_blocks
from attnc.plan.signature import feature, normalise
from attnc.plan.sm80.layout import GRANULE, MMA, UNALIGNED_ROWS
from attnc.plan.sm90.decode_layout import REGISTERS, Sm90DecodeLayout
from attnc.plan.sm90.layout import (
    FREE_REGISTERS,
    PIECE,
    WGMMA_ROWS,
    WIDEST,
    Copies,
    beyond_shared_memory,
    hopper,
    swizzle_rows,
    widest_product,
)
from attnc.plan.sm90.narrow import (
    PIECE_OF_BYTES,
    narrow_misfit,
    narrow_of,
)
from attnc.plan.sm90.order import ordered_tiles

#: Tiles of keys for each multiprocessor below which two blocks share the columns of o; measured on an H200.
FEW_TILES = 1
#: What a block that walks over a union of lists reads alone, of what two on a multiprocessor read: 64 tiles
#: of 58 blocks take 54 us in one split and 28 in four (one H200).
UNION_SHARE = 0.65
#: How much faster a multiprocessor is at tiles of two warpgroups while others idle: tensor cores bound it.
LATENT_IDLE_GAIN = 1.0
#: What a byte of their partial results costs in bytes of keys: few blocks join them. Measured there.
LATENT_TRIPS = 4
#: Fewest keys in a box that TMA copies: the swizzle repeats after so many rows.
_FEWEST_KEYS = 8
#: What a schedule gets for the keys that it does not mention: the first that fits.
_TILES = (Tiles(tile_kv=64, stages=2), Tiles(tile_kv=32, stages=2))
#: The same before these where each has columns of V alone; of K one tile may do.
_SPLIT_TILES = (Tiles(tile_kv=64, stages=2), Tiles(tile_kv=48, stages=2))
#: The same before these where rows of 8 bits are converted. Two blocks have room for two more tiles of 8 bits
#: in place of a second stage, and beside scales for no second stage: one token of 32 sequences of 8192 keys
#: takes 107 us in place of 134 (16 heads on 4 of d128).
_CONVERTED_TILES = (Tiles(tile_kv=64, stages=1),)
#: The same before these where rows have up to 64 columns of 16 bits: as many bytes are asked for at once. Not
#: where two of these tiles hold all keys that a query sees: a window of 128 takes 24 us, not 29 (one H200).
_NARROW_KEYS = 128
_NARROW_TILES = (Tiles(tile_kv=_NARROW_KEYS, stages=2),)
#: The same where each warpgroup has rows of its own, as many as one has keys.
_TILES_OF_ROWS = (
    Tiles(tile_kv=128, stages=4),
    Tiles(tile_kv=128, stages=3),
    Tiles(tile_kv=128, stages=2),
    Tiles(tile_kv=96, stages=2),
    Tiles(tile_kv=64, stages=2),
)
#: Tiles of keys that a block walks over, up to which a third stage is asked for too early, where a lazy
#: maximum has one: 64 sequences of 512 keys and 32 queries take 60.6 us by two and 68.4 by three, those of
#: 1024 keys 93.6 and 93.0.
SHORT_WALK = 7
#: Splits up to which one group of threads joins those of a row, and not a block.
_FEW_SPLITS = 8
_REMEDIES: Mapping[str, Sequence[Value]] = {
    "tile.q": (WGMMA_ROWS,),
    "stages": (2,),
    "tile.kv": (64, 32, 16),
}


def check_sm90_decode(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Reasons why decoding cannot be compiled for Hopper, besides those that hold for its other kernels."""
    attention, knobs = variant.attention, schedule.forward
    d, dv = feature(attention.q), feature(attention.v)
    in_k = attention.v.storage.is_part
    if dv > 2 * WIDEST or (dv > WIDEST and in_k and dv % (2 * PIECE)):
        multiple = f"a multiple of {2 * PIECE} up to" if in_k else "not more than"
        yield unsupported(
            f"{dv} columns of o are not lowered to {schedule.target}",
            attention.v.span,
            f"two warpgroups share them where they are {multiple} {2 * WIDEST}",
            "write a schedule for the target 'triton'",
        )
    stored = (attention.v, attention.k)
    narrow = next((tensor for tensor in stored if DType(tensor.dtype).is_narrow), None)
    if dv > WIDEST and not in_k and narrow is not None:
        what = "values" if narrow is attention.v else "keys"
        yield unsupported(
            f"{dv} columns of o beside {what} of {narrow.dtype} are not lowered to {schedule.target}",
            narrow.span,
            "two warpgroups share them where both have 16 bits, or values are in the keys",
            *(() if lists_blocks(attention) else ("write 'convert = before' for prompts",)),
            "write a schedule for the target 'triton'",
        )
    for size, tensor in {dv: attention.v, d: attention.q}.items():
        if size % GRANULE:
            yield unsupported(
                f"the head dimension {size} is not a multiple of {GRANULE}",
                tensor.span,
                UNALIGNED_ROWS,
                "pad the last axis",
            )
    layout = sm90_decode_layout(variant, schedule)
    is_joined = layout.joined and in_k  # others are refused as such
    if not layout.gathers and narrow is not None and (is_joined or lists_blocks(attention)):
        what = "keys of two inputs" if is_joined else "lists of keys of 8 bits"
        yield unsupported(
            f"{what} are not lowered to {schedule.target}",
            narrow.span,
            "rows come by way of registers, where values are in the keys and two warpgroups multiply",
            "write 'consumers = 2'" if in_k else "write a schedule for the target 'triton'",
        )
    shares = layout.sharing == 2 and layout.v_in_k
    lazy = layout.walks_again or (attention.segment is not None and layout.consumers == 1)
    overlaps = layout.sharing == 1 and not (
        layout.v_in_k or layout.in_order or layout.narrow or _lists_entries(attention, schedule)
    )
    yield from check_decode_knobs(knobs, schedule, shares=shares, lazy=lazy, overlaps=overlaps)


def check_decode_knobs(
    knobs: Mapping[str, Knob],
    schedule: Schedule,
    *,
    shares: bool = False,
    lazy: bool = False,
    overlaps: bool = False,
) -> Iterator[Diagnostic]:
    """Yields keys with values that no decode kernel of the target has. shares: blocks may share columns of
    o; overlaps: p v may run beside a softmax.
    """
    for knob in knobs.values():
        yield from _knob(knob, schedule.target, shares=shares, lazy=lazy, overlaps=overlaps)


def draws_decoded(variant: Variant, schedule: Schedule) -> bool:
    """Returns whether two warpgroups draw what dropout keeps, each of its own tiles."""
    attention = variant.attention
    return (
        sm90_decode_layout(variant, schedule).shares_columns
        and not narrow_of(attention)
        and not lists_blocks(attention)
    )


def page_of(attention: Attention) -> int:
    return attention.k.storage.rows_of_page


def copies_of(attention: Attention) -> Copies:
    """Returns how tiles of keys come: in boxes where all keys of a box lie in one page, since tiles begin at
    multiples of 16 keys.
    """
    return "rows" if page_of(attention) % _FEWEST_KEYS else "boxes"


def _knob(knob: Knob, target: str, *, shares: bool, lazy: bool, overlaps: bool) -> Iterator[Diagnostic]:
    if knob.key in ("consumers", "softmax", "pack", "overlap") and len(knob.choices) > 1:
        yield several_values(knob)
        return
    match knob.key, knob.choices[0]:
        case "overlap", True if overlaps:
            return
        case "overlap", _:
            label = "two warpgroups, or two blocks, take turns"
            yield unsupported("a decode kernel has no overlap to choose", knob.span, label, "remove it")
        case "cluster", _:
            label = "a block has all rows that read its keys"
            yield unsupported("a decode kernel has no clusters", knob.span, label, "remove it")
        case "blocks", _:
            label = "two where one warpgroup multiplies, else one"
            yield unsupported("a decode kernel has no blocks to choose", knob.span, label, "remove it")
        case "pingpong", _:
            label = "waits for memory, not for products"
            yield unsupported("a decode kernel has no turns to choose", knob.span, label, "remove it")
        case "tile.d", _ if not shares:
            label = (
                "blocks share the columns of o where its values are in the keys and two warpgroups multiply"
            )
            yield unsupported(
                "the head dimension stays whole in this CUDA kernel", knob.span, label, "remove it"
            )
        case "softmax", Choice(name="two_pass" | "unified_max"):
            label = "keys come by once, under a running maximum"
            yield unsupported(
                f"this softmax is not lowered to {target}", knob.span, label, "write 'softmax = online'"
            )
        case "softmax", Choice(args={"maximum": _}) if not lazy:
            label = "few rows, whose maximum is quickly found"
            yield unsupported(
                "the decode kernel has no lazy maximum", knob.span, label, "write 'softmax = online'"
            )


def _joins_rows(attention: Attention) -> bool:
    """Returns whether a block can join the splits of many rows: what joins them does nothing else."""
    return attention.normalises and attention.epilogue is None


def walks_segments(variant: Variant, schedule: Schedule) -> bool:
    """Returns whether a block has all segments of its rows, one after the other: two warpgroups, whose kernel
    is that of prompts too, where a schedule splits no keys.
    """
    split = schedule.forward.get("split.kv")
    is_whole = split is None or split.choices == (1,)
    if variant.attention.segment is None or not schedule.is_decode or not is_whole:
        return False
    return sm90_decode_layout(variant, schedule).shares_columns


def sm90_decode_layout(variant: Variant, schedule: Schedule) -> Sm90DecodeLayout:
    """Returns the layout that all configs of a schedule share."""
    attention = variant.attention
    d, dv = feature(attention.q), feature(attention.v)
    element = DType(attention.q.dtype)
    knobs = schedule.forward
    consumers, columns = knobs.get("consumers"), knobs.get("tile.d")
    rows = knobs.get("tile.q")
    by_rows = rows is not None and rows.choices == (2 * WGMMA_ROWS,) and dv <= WIDEST
    count = consumers.choices[0] if consumers else 2 if dv > WIDEST or by_rows else 1
    whole = 2 * PIECE if dv > WIDEST and not attention.v.storage.is_part else PIECE  # of both warpgroups
    shares = dv % (4 * PIECE) == 0 if columns is None else columns.choices != (dv,)
    narrow, in_k = narrow_of(attention), attention.v.storage.is_part
    by_entry, is_plain = _lists_entries(attention, schedule), not lists_blocks(attention)
    copies: Copies = "rows" if by_entry else copies_of(attention)
    return Sm90DecodeLayout(
        arch=schedule.target.removeprefix("cuda."),
        element=element,
        d=d,
        dv=dv,
        qk=swizzle_rows(d, element),
        v=swizzle_rows(-(-dv // whole) * whole, element),
        warp_split="q",
        streamed="kv",
        v_in_k=in_k,
        consumers=count if isinstance(count, int) else 1,
        by_rows=by_rows,
        shares=count == 2 and shares and in_k and attention.segment is None,
        in_order=attention.segment is not None,
        page=1 if by_entry else page_of(attention),
        copies="registers" if narrow and count == 2 and in_k else copies,
        room=DEVICES["sm_90"].shared_per_block,
        narrow=narrow,
        joined=d - feature(attention.k),
        overlaps="overlap" in knobs,
        walks_again=is_plain
        and "overlap" in knobs
        and attention.segment is None
        and _is_lazy(knobs.get("softmax")),
        few_splits=_FEW_SPLITS if "overlap" in knobs and _joins_rows(attention) else 0,
        unites=unites_blocks(attention, schedule),
    )


def _lists_entries(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether a kernel knows of no keys but those that a list names."""
    return lists_blocks(attention) and not unites_blocks(attention, schedule)


def _is_lazy(knob: Knob | None) -> bool:
    return knob is not None and any(isinstance(x, Choice) and "maximum" in x.args for x in knob.choices)


def sm90_decode_configs(variant: Variant, schedule: Schedule) -> tuple[HopperConfig, ...]:
    """Returns the configs that can run, in their order. Raises DiagnosticError (E0601) when there is none."""
    knobs, layout = schedule.forward, sm90_decode_layout(variant, schedule)
    found = [hopper(config) for config in configs(schedule, "forward", variant)]
    groups = [
        [
            completed
            for config in found
            for completed in _complete(tiles.without(knobs).of(config), knobs, layout)
        ]
        for tiles in _list_tiles(variant.attention, layout)
    ]
    if unites_blocks(variant.attention, schedule):
        groups = [[*fit_blocks(group, variant, schedule, "forward")] for group in groups]
    groups = [cut for group in groups if (cut := [x for x in group if keys_of_split(x) % x.tile_kv == 0])]
    fitting = next((g for g in groups if any(_misfit(config, layout) is None for config in g)), groups[0])
    if layout.walks_again and "stages" not in knobs:
        fitting = [x for config in fitting for x in (config, replace(config, stages=min(2, config.stages)))]
    candidates = tuple(dict.fromkeys(fitting))
    reasons = [_misfit(config, layout) for config in candidates]
    kept = tuple(config for config, reason in zip(candidates, reasons, strict=True) if reason is None)
    if not kept:
        hints = remedy(candidates[0], _REMEDIES, lambda config: _misfit(config, layout))
        raise nothing_fits(schedule, "forward", reasons[0] or "", where=schedule.target, hints=hints)
    return kept


def _list_tiles(attention: Attention, layout: Sm90DecodeLayout) -> tuple[Tiles, ...]:
    if attention.segment is not None:
        return ordered_tiles(attention, decodes=True)
    return (*_first_tiles(attention, layout), *_TILES)


def _first_tiles(attention: Attention, layout: Sm90DecodeLayout) -> tuple[Tiles, ...]:
    widest = max(layout.d, layout.dv)
    if layout.by_rows:
        return _TILES_OF_ROWS
    if layout.consumers != 1:
        return _SPLIT_TILES if layout.splits_keys else ()
    if layout.narrow.scales or (layout.narrow and PIECE < widest <= 2 * PIECE):
        return _CONVERTED_TILES
    if widest > PIECE or layout.narrow or _sees_few(attention, 2 * _NARROW_KEYS):
        return ()
    return _NARROW_TILES


def _sees_few(attention: Attention, keys: int) -> bool:
    """Returns whether the mask leaves a run of at most so many keys to each query."""
    ranges = solve(normalise(attention).mask)
    if ranges.may_lo is None or ranges.may_hi is None:
        return False
    end = substitute(ranges.may_hi, {Index("q_hi"): Index("q_lo")})
    return at_least(shift(ranges.may_lo, keys), end)


def _complete(
    config: HopperConfig, knobs: Mapping[str, Knob], layout: Sm90DecodeLayout
) -> Iterator[HopperConfig]:
    """With what follows from the number of warpgroups, where the schedule does not say it; and once more for
    blocks that share the columns of o.
    """
    config = (
        Tiles(tile_q=layout.rows, warps=4 * (layout.consumers + layout.copying)).without(knobs).of(config)
    )
    held = layout.registers_of(layout.consumers)[1] if layout.consumers in REGISTERS else 0
    config = replace(
        config,
        consumers=config.consumers if "consumers" in knobs else layout.consumers,
        registers=config.registers if "registers" in knobs else held,
    )
    if "tile.d" in knobs:
        yield config
        return
    yield replace(config, tile_d=layout.dv)
    if layout.shares:
        yield replace(config, tile_d=layout.dv // 2)


def _misfit(config: HopperConfig, layout: Sm90DecodeLayout) -> str | None:
    consumers, tile_kv = layout.consumers, config.tile_kv
    if consumers not in REGISTERS:
        return f"consumers = {consumers}: one, or two that share the columns of o"
    shared = layout.dv_multiplied if layout.v_in_k else layout.v.width  # each has whole pieces of the keys
    if layout.shares_columns and (shared % (2 * PIECE) or not (layout.v_in_k or layout.dv > WIDEST)):
        share = f"consumers = 2 share a multiple of {2 * PIECE} columns of values that are in the keys"
        return f"{share}, or are more than {WIDEST}"
    if layout.shares and (layout.dv % config.tile_d or config.tile_d % (2 * PIECE)):
        return f"tile.d = {config.tile_d}: blocks share {layout.dv} columns of o by multiples of {2 * PIECE}"
    if layout.columns(config) > WIDEST:
        return (
            f"consumers = {consumers} leaves {layout.columns(config)} columns of o to each: {WIDEST} at most"
        )
    copying = f"4 for each of consumers = {consumers}, and {4 * layout.copying} that copy"
    for key, size, needed, why in (
        ("tile.q", config.tile_q, layout.rows, "the rows of a wgmma"),
        ("warps", config.warps, 4 * (consumers + layout.copying), copying),
        ("registers", config.registers, layout.consumer_registers, "what the launch holds"),
    ):
        if size != needed:
            return f"{key} = {size} is not {needed}: {why}"
    if tile_kv % MMA or tile_kv > WIDEST:
        return f"tile.kv = {tile_kv} is not a multiple of {MMA} up to {WIDEST}"
    if layout.shares_columns and tile_kv > PIECE:
        return f"tile.kv = {tile_kv}: {PIECE} at most where two warpgroups share the columns of o"
    if layout.narrow and (reason := narrow_misfit(tile_kv)):
        return reason
    if config.stages < 2 and not (layout.narrow and consumers == 1):
        return "stages = 1 leaves nothing to copy ahead: two at least"
    needed = sum(sm90_decode_registers(layout, config).values())
    if needed > (held := layout.consumer_registers):
        return f"needs about {needed} registers a thread; one that multiplies has {held}"
    if tile_kv > (widest := widest_product(layout.entry_registers)):
        starts = f"a thread starts with {layout.entry_registers} registers"
        return f"tile.kv = {tile_kv}: one product has {widest} columns at most, for {starts}"
    return beyond_shared_memory(layout.shared_memory(config), layout.room)


def sm90_decode_registers(layout: Sm90DecodeLayout, config: TileConfig) -> dict[str, int]:
    """Registers of a thread that multiplies by value, and an allowance for the rest."""
    return {**layout.registers(config), "other": FREE_REGISTERS}


def sm90_decode_estimate(layout: Sm90DecodeLayout, config: TileConfig) -> Estimate:
    """Returns what a block takes: shared memory exactly, registers as far as the plan knows."""
    tile_kv, stages = config.tile_kv, config.stages
    shapes = {
        "q": f"{layout.rows}x{layout.qk.width}",
        "k": f"{layout.key_stages(config)} x {tile_kv}x{layout.qk.width}",
        "v": f"{stages} x {tile_kv}x{layout.v.width}",
        "8 bits": f"{layout.ahead(config)} x {tile_kv}x{layout.narrow.panels * PIECE_OF_BYTES}",
        "scales": f"{tile_kv}x{layout.narrow.scales}",
        "p": f"{WGMMA_ROWS}x{tile_kv}",
        "statistics": f"2 x {5 if layout.in_order else 2}x{WGMMA_ROWS}",
        "failures": f"{4 * layout.consumers} warps",
        "barriers": str(sum(layout.barriers(config).values())),
    }
    return Estimate(
        buffers=tuple(
            Buffer(name=name, shape=shapes[name], bytes=size)
            for name, size in layout.shared_memory(config).items()
        ),
        registers=sm90_decode_registers(layout, config),
    )


def sm90_decode_roles(layout: Sm90DecodeLayout, config: TileConfig) -> Iterator[str]:
    """Yields what the warpgroups of a block do."""
    copying, multiplying = layout.registers_of(layout.consumers)
    barriers = layout.barriers(config)
    yield f"roles: of {layout.threads(config)} threads"
    paged = f", {layout.box(config.tile_kv)} keys at once" if layout.page else ""
    ways = {"rows": "rows of keys by cp.async", "registers": "rows of keys by way of registers"}
    tiles = ways.get(layout.copies, f"tiles{paged}")
    converted = f", converts {' and '.join(layout.narrow.tensors)} of 8 bits" if layout.narrow else ""
    several = "s" if layout.copying > 1 else " "
    yield f"  {layout.copying} warpgroup{several}  {copying:3} registers a thread: copies {tiles}{converted}"
    what = (
        f"{layout.columns(config)} of {layout.dv} columns of o each, p of every other tile"
        if layout.shares_columns
        else f"{WGMMA_ROWS} rows each"
        if layout.by_rows
        else "all columns of o"
    )
    plural = "s" if layout.consumers > 1 else " "
    yield f"  {layout.consumers} warpgroup{plural}  {multiplying:3} registers a thread: {what}"
    listed = ", ".join(f"{name} {count}" for name, count in barriers.items())
    yield f"  {sum(barriers.values())} mbarriers: {listed}"
