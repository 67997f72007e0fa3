"""What the Hopper target decides beyond a kernel's structure: which specs it takes, which configs run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import gcd

from attnc.diagnostics import Diagnostic
from attnc.expr.nodes import Dot, Expr, Load, Search, walk
from attnc.expr.solve import solve
from attnc.model.attention import Attention, Variant
from attnc.model.configs import configs
from attnc.model.dtypes import DType
from attnc.model.schedule import Choice, HopperConfig, Knob, Schedule, TileConfig, Value
from attnc.model.tensors import Tensor
from attnc.plan.device import DEVICES
from attnc.plan.fitting import Tiles, nothing_fits, remedy, several_values, unsupported
from attnc.plan.layout import Buffer, Estimate
from attnc.plan.lists import divide_blocks, listing_of
from attnc.plan.loads import axes_of
from attnc.plan.signature import feature, normalise
from attnc.plan.sm80.layout import GRANULE, MMA, UNALIGNED_ROWS
from attnc.plan.sm90.conversion import check_conversion
from attnc.plan.sm90.decode import check_sm90_decode, copies_of, page_of
from attnc.plan.sm90.finishing import rows_axis
from attnc.plan.sm90.latent import refuse_wide_gradients
from attnc.plan.sm90.layout import (
    DRAWN_TILES,
    FREE_REGISTERS,
    PIECE,
    WGMMA_ROWS,
    WIDEST,
    Sm90Layout,
    beyond_shared_memory,
    entry_registers,
    hopper,
    most_registers,
    registers_left,
    row_copies,
    swizzle_rows,
    widest_product,
)
from attnc.plan.sm90.narrow import (
    CONVERTING_REGISTERS,
    PIECE_OF_BYTES,
    narrow_misfit,
    narrow_of,
)
from attnc.plan.sm90.order import WIDEST_KEPT, ordered_tiles
from attnc.plan.sm90.scores import COLUMN_BYTES, PAIR_STAGES, columns_of, pair_of
from attnc.plan.sm90.softcap import cap_of
from attnc.plan.sm90.warps import check_warps, has_keys_of_warps
from attnc.plan.softmax import split_scale

TARGET = "cuda.sm_90a"
#: Bytes of shared memory of a block.
ROOM = DEVICES["sm_90"].shared_per_block
#: What a schedule gets for the keys that it does not mention: the first that fits, by the wider of D and Dv.
_TILES: Sequence[tuple[int, Tiles]] = (
    (64, Tiles(tile_kv=128, stages=4)),
    (128, Tiles(tile_kv=128, stages=2)),
    (192, Tiles(tile_kv=96, stages=2)),
    (256, Tiles(tile_kv=80, stages=2)),
)
#: The same of `consumers`.
CONSUMERS = 2
#: And of masks that end on both sides (windows, documents), where the registers of three warpgroups hold rows
#: as wide: a tile of queries sees few keys, and each warpgroup walks over those that its own rows see. Beside
#: wider rows two take as many keys as one has rows: 1 to 7 % faster than 80 keys at 256 columns, 3 to 21 %
#: than 96 at 192 (windows of 512 to 4096 keys, measured on an H200).
#: And of heads between 64 and 128 columns, where three warpgroups multiply for each copy of K and V what two
#: did: 13 to 29 % faster at 72, 88 and 104 columns, whose rows begin within sectors of 32 bytes, up to 13 %
#: at others; of 128 columns under a causal mask 1 to 5 %, but not without a mask, and not beside lengths of
#: sequences: 15 to 20 % slower for 16 of 1,024 keys, up to 5 % for two of 8,192 (measured on an H200).
_SHORT_TILES = Tiles(tile_q=192, tile_kv=64, stages=4)
_WIDEST_SHORT = 128
#: And where blocks share a multiprocessor.
_SHARING_TILES = Tiles(tile_kv=64, stages=4)
#: Stages of these, for no more keys than two tiles: what more of them hold is of the next tile of queries.
STAGES_OF_FEW = 2
#: And beside these, for many rows of as many sequences that fill all multiprocessors.
_LONG_TILES = Tiles(tile_q=256, tile_kv=64, stages=4)
#: And of a load of 32 bits for each query and key, beside heads of so many columns: there is room for two of
#: its tiles.
_WIDE_PAIR_TILES = Tiles(tile_q=192, tile_kv=64, stages=2)
_WIDE_PAIR_COLUMNS = range(65, 129)
#: Columns up to which a producer that copies rows, or capped scores by a polynomial, leave the registers of
#: such tiles: beyond, 64 keys.
_WIDEST_BESIDE_ROWS = 192
#: Keys with which a schedule has chosen between the two.
_CHOOSING = {"consumers", "tile.q", "tile.kv", "registers", "warps"}
#: And those whose gain was measured with two warpgroups.
_BESIDE_TILES = {"stages", "blocks", "cluster", "pingpong", "overlap"}
#: Registers of a thread that does not multiply, beside two warpgroups that do.
_HELPING = 40
_REMEDIES: Mapping[str, Sequence[Value]] = {
    "stages": (2,),
    "tile.kv": (128, 80, 64, 48, 32),
    "consumers": (2,),
}


def check_sm90(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields every reason why the Hopper target cannot compile this variant under this schedule."""
    attention, knobs = variant.attention, schedule.forward
    yield from check_conversion(attention, schedule)
    portable = "a schedule for 'cuda.sm_80' runs on this architecture too"
    if attention.q.dtype is DType.F32:
        label = "wgmma multiplies f16 and bf16"
        yield unsupported(
            f"{attention.q.dtype} is not lowered to {TARGET}", attention.q.span, label, portable
        )
    if attention.o.dtype != attention.q.dtype:
        yield unsupported(
            f"o of {attention.o.dtype} from q of {attention.q.dtype} is not lowered to CUDA",
            attention.o.span,
            "it leaves as a tile of the same type",
            f"declare an output of {attention.q.dtype}, or use the target 'triton'",
        )
    if schedule.is_decode:
        check = check_warps if has_keys_of_warps(schedule) else check_sm90_decode
        yield from check(variant, schedule)
        return
    for size, tensor in {feature(tensor): tensor for tensor in (attention.v, attention.q)}.items():
        if size % GRANULE:
            message = f"the head dimension {size} is not a multiple of {GRANULE}"
            yield unsupported(message, tensor.span, UNALIGNED_ROWS, "pad the last axis")
        if size > WIDEST:
            yield _too_wide(tensor, normalise(attention))
    for knob in knobs.values():
        yield from _knob(knob, portable)
    if _ever(schedule, "cluster", 1):
        yield from _check_cluster(attention, knobs["cluster"])
    if narrow_of(attention) and attention.softmax.dropout is not None:
        label = "warpgroups that draw, convert and multiply have too few registers"
        yield unsupported(
            f"dropout beside k or v of 8 bits is not lowered to {TARGET}",
            attention.softmax.span,
            label,
            "write 'convert = before', or a schedule for the target 'triton'",
        )


def _too_wide(tensor: Tensor, attention: Attention) -> Diagnostic:
    """Returns why a kernel that walks over keys for each tile of queries does not have such heads, which that
    for decoding may have.
    """
    size, why = feature(tensor), ""
    if feature(attention.v) > 2 * WIDEST:
        why = f"two warpgroups share up to {2 * WIDEST} columns"
    elif attention.grads and not attention.v.storage.is_part:
        why = refuse_wide_gradients(attention)
    return unsupported(
        f"the head dimension {size} is more than {WIDEST}",
        tensor.span,
        why or f"wider than a product of wgmma; two warpgroups share up to {2 * WIDEST} columns of o",
        f"a schedule for 'triton' compiles rows of {size}" if why else "write 'loops = [kv], pack = gqa'",
    )


def _check_cluster(attention: Attention, knob: Knob) -> Iterator[Diagnostic]:
    if page_of(attention):
        label = "a tile is boxes of several pages, which the lanes of a block's warps copy"
        what = "tiles of pages are not shared by a cluster"
    elif narrow_of(attention):
        label = "each block converts its own tiles"
        what = "tiles of 8 bits are not shared by a cluster"
    elif attention.q.storage.is_packed:
        label = "neighbouring query tiles may be of two sequences, which see other keys"
        what = "tiles of packed sequences are not shared by a cluster"
    else:
        return
    yield unsupported(what, knob.span, label, "write 'cluster = 1', or remove it")


def _knob(knob: Knob, portable: str) -> Iterator[Diagnostic]:
    structure = ("loops", "softmax", "order", "persistent", "warp_split")
    if knob.key in structure and len(knob.choices) > 1:
        yield several_values(knob)
        return
    match knob.key, knob.choices[0]:
        case "loops", ("kv", "q"):
            label = "queries stay, and keys come by"
            yield unsupported(f"loops = [kv, q] is not lowered to {TARGET}", knob.span, label, portable)
        case "warp_split", "kv":
            label = "a warpgroup has rows of the query tile, and all keys"
            yield unsupported(f"'warp_split = kv' is not lowered to {TARGET}", knob.span, label, portable)
        case "persistent", False:
            label = "blocks stay, and take tiles from a counter"
            yield unsupported(f"kernels of {TARGET} are persistent", knob.span, label, "remove it")
        case "tile.d", _:
            label = "cannot be tiled"
            yield unsupported(
                "the head dimension stays whole in a CUDA kernel", knob.span, label, "remove it"
            )
        case "softmax", Choice(name="two_pass" | "unified_max") | Choice(args={"rescale": "every_step"}):
            label = "keys come by once"
            hint = "write 'softmax = online', or 'online(maximum = lazy(20))'"
            yield unsupported(f"this softmax is not lowered to {TARGET}", knob.span, label, hint)


def sm90_layout(variant: Variant, schedule: Schedule) -> Sm90Layout:
    """Returns the layout that all configs of a schedule share."""
    attention = normalise(variant.attention)  # its loads are those that the kernel has
    d, dv = feature(attention.q), feature(attention.v)
    element = DType(attention.q.dtype)
    _, score = split_scale(attention.score)
    adds_alike = attention.segment is not None  # decode kernels add to the product element by element
    columns = columns_of(score, attention.mask) if attention.normalises and not adds_alike else None
    read = [attention.score if columns is None else columns.product, attention.mask]
    read += [] if attention.softmax.v_scale is None else [attention.softmax.v_scale]
    dtypes = {tensor.name: DType(tensor.dtype) for tensor in attention.inputs}
    pair = pair_of(attention.score, attention.mask, dtypes)
    layout = Sm90Layout(
        arch=schedule.target.removeprefix("cuda."),
        element=element,
        d=d,
        dv=dv,
        qk=swizzle_rows(d, element),
        v=swizzle_rows(dv, element),
        warp_split="q",
        streamed="kv",
        by_tma=attention.q.storage.is_plain or attention.q.storage.is_packed,
        packed=attention.q.storage.is_packed,
        pingpong=_ever(schedule, "pingpong", False),
        overlap=_find_overlap(variant, schedule),
        room=ROOM,
        vectors=len({node for expr in read for node in walk(expr) if _is_of_key(node)}),
        draws=attention.softmax.dropout is not None,
        columns=0 if columns is None else len(columns.terms),
        key_columns=0 if columns is None else sum(term.of_key is not None for term in columns.terms),
        columns_factor=1.0 if columns is None else abs(columns.c),
        capped=not adds_alike and _is_capped(attention, schedule.forward),
        copies=copies_of(attention),
        clusters=_ever(schedule, "cluster", 1),
        shares=any(config.blocks > 1 for config in chain.from_iterable(groups_of(variant, schedule))),
        narrow=narrow_of(attention, apart=True),
        keeps_sums=attention.segment is not None and max(d, dv) <= WIDEST_KEPT,
        boxes_rows=not adds_alike and _has_boxes_of_rows(attention, dtypes),
    )
    if pair is None or page_of(attention):  # pages take the warps that would copy it
        return layout
    return _with_pairs(layout, dtypes[pair.tensor].bytes, chain.from_iterable(groups_of(variant, schedule)))


def _with_pairs(layout: Sm90Layout, size: int, candidates: Iterable[HopperConfig]) -> Sm90Layout:
    config = next(
        (x for x in candidates if sum(layout.shared_memory(x).values()) <= layout.room_of(x.blocks)), None
    )
    for stages in PAIR_STAGES if config is not None else ():
        found = replace(layout, pair=size, pair_stages=stages)
        if config is not None and sum(found.shared_memory(config).values()) <= found.room_of(config.blocks):
            return found
    return layout


def _has_boxes_of_rows(attention: Attention, dtypes: Mapping[str, DType]) -> bool:
    """Returns whether the epilogue loads rows that TMA can copy; those of packed queries end anywhere."""
    if attention.epilogue is None or not attention.q.storage.is_plain:
        return False
    loads = (node for node in walk(attention.epilogue) if isinstance(node, Load))
    return any(dtypes[load.tensor].bytes == 2 and rows_axis(load) is not None for load in loads)


def _is_capped(attention: Attention, knobs: Mapping[str, Knob]) -> bool:
    """Returns whether scores are capped by a polynomial, which wants a maximum with headroom. attention: as a
    kernel has it.
    """
    knob = knobs.get("softmax")
    choice = None if knob is None else knob.choices[0]
    has_headroom = isinstance(choice, Choice) and "maximum" in choice.args
    scale, score = split_scale(attention.score)
    return has_headroom and cap_of(score, scale) is not None


def _ever(schedule: Schedule, key: str, usual: Value) -> bool:
    knob = schedule.forward.get(key)
    return knob is not None and any(choice != usual for choice in knob.choices)


def _find_overlap(variant: Variant, schedule: Schedule) -> bool | None:
    found = map(hopper, configs(schedule, "forward", variant))
    chosen = {_overlaps(config, schedule.forward) for config in found}
    return None if len(chosen) > 1 else chosen == {True}


def _overlaps(config: HopperConfig, knobs: Mapping[str, Knob]) -> bool:
    """Returns whether a config overlaps: two blocks leave that to each other, unless a schedule says it."""
    return config.overlap if "overlap" in knobs else config.blocks == 1


def helpers_of(variant: Variant) -> int:
    """Warpgroups that do not multiply: one that copies, one that draws what dropout keeps, and one that
    converts.
    """
    attention = variant.attention
    return 1 + (attention.softmax.dropout is not None) + bool(narrow_of(attention))


def _is_of_key(node: Expr) -> bool:
    return isinstance(node, Load) and {axis for index in node.indices for axis in axes_of(index)} == {"kv"}


def sm90_configs(variant: Variant, schedule: Schedule) -> tuple[HopperConfig, ...]:
    """Returns the configs that can run, in their order. Raises DiagnosticError (E0601) when there is none."""
    layout = sm90_layout(variant, schedule)
    groups = list(groups_of(variant, schedule))
    fitting = (g for g in groups if any(sm90_misfit(x, variant, layout) is None for x in _first_of(g)))
    candidates = next(fitting, groups[0])
    reasons = [sm90_misfit(config, variant, layout) for config in candidates]
    kept = tuple(config for config, reason in zip(candidates, reasons, strict=True) if reason is None)
    if not kept:

        def set_rows(config: HopperConfig) -> HopperConfig:
            rows = replace(config, tile_q=WGMMA_ROWS * config.consumers)
            return _with_warps(rows, helpers_of(variant))

        hints = remedy(
            candidates[0],
            _REMEDIES,
            lambda config: sm90_misfit(config, variant, layout),
            completed=set_rows,
            said=[key for key in ("tile.q", "warps") if key in schedule.forward],
        )
        raise nothing_fits(schedule, "forward", reasons[0] or "", where=schedule.target, hints=hints)
    return kept


def _first_of(group: Sequence[HopperConfig]) -> Iterator[HopperConfig]:
    """Yields the configs by which a group is chosen: those of as few blocks a multiprocessor as any has."""
    fewest = min(config.blocks for config in group)
    return (config for config in group if config.blocks == fewest)


def groups_of(variant: Variant, schedule: Schedule) -> Iterator[tuple[HopperConfig, ...]]:
    """Yields the configs that the schedule allows, whether they fit or not; further groups have fewer keys in
    tiles that no schedule chose.
    """
    knobs = schedule.forward
    found = [hopper(config) for config in configs(schedule, "forward", variant)]
    if "order" not in knobs and _differs_by_data(variant):
        found = [replace(config, order="longest_first") for config in found]
    shared = [config for config in found if config.blocks == 1] if _varies_blocks(variant, knobs) else []
    listing = listing_of(variant.attention)
    block = (0, 0) if listing is None else (listing.rows, listing.keys)
    for tiles in _tiles_of(variant, knobs):
        group = dict.fromkeys(_complete(config, tiles, knobs, variant) for config in found)
        group |= dict.fromkeys(_complete(config, _LONG_TILES, knobs, variant) for config in shared)
        if shared:
            group |= dict.fromkeys(replace(x, stages=STAGES_OF_FEW) for x in tuple(group) if x.blocks > 1)
        if tiles is _SHORT_TILES and _shortens_to_two(variant, knobs):
            two = _tiles_of_width(variant)
            group |= dict.fromkeys(_complete(config, two, knobs, variant) for config in found)
        if fitted := divide_blocks(group, block):
            yield fitted


def _varies_blocks(variant: Variant, knobs: Mapping[str, Knob]) -> bool:
    """Returns whether a schedule leaves it to calls how many blocks share a multiprocessor, and chooses no
    tiles for either.
    """
    knob = knobs.get("blocks")
    is_open = knob is not None and len(knob.choices) > 1 and not knobs.keys() & {*_CHOOSING, "stages"}
    return is_open and _width_of(variant) <= PIECE


#: Boxes of a tile of pages: a lane of two warps copies one each.
_MOST_BOXES = 64


def _tiles_of(variant: Variant, knobs: Mapping[str, Knob]) -> Iterator[Tiles]:
    if variant.attention.segment is not None:
        yield from ordered_tiles(variant.attention, decodes=False)
        return
    width, first = _width_of(variant), _tiles_of_width(variant)
    chooses = bool(knobs.keys() & _CHOOSING)
    pair = _pair_of(variant)
    if not chooses and _has_short_loops(variant):
        yield _SHORT_TILES if width <= _WIDEST_SHORT else replace(first, tile_kv=WGMMA_ROWS)
    elif not knobs.keys() & {*_CHOOSING, *_BESIDE_TILES} and _suits_three(variant):
        yield _SHORT_TILES
    if width in _WIDE_PAIR_COLUMNS and not chooses and pair is not None and pair.bytes == 4:
        yield _WIDE_PAIR_TILES
    draws = variant.attention.softmax.dropout is not None
    if width <= PIECE and draws and pair is not None and pair.bytes == 4:
        first = replace(first, stages=2)  # leaves room for a tile of it
    if width > _WIDEST_BESIDE_ROWS and (
        copies_of(variant.attention) == "rows" or _is_capped(normalise(variant.attention), knobs)
    ):
        first = replace(first, tile_kv=64)
    listing = listing_of(variant.attention)
    if listing is not None and listing.rows % (CONSUMERS * WGMMA_ROWS):
        first = replace(first, tile_q=WGMMA_ROWS, tile_kv=64)
    yield first
    for keys in (64, 48, 32):
        if keys < (first.tile_kv or 0):
            yield replace(first, tile_kv=keys)


def _tiles_of_width(variant: Variant) -> Tiles:
    width = _width_of(variant)
    return next(tiles for widest, tiles in _TILES if width <= widest)


def _shortens_to_two(variant: Variant, knobs: Mapping[str, Knob]) -> bool:
    """Returns whether calls of few rows take tiles of two warpgroups in place of three: of a mask that hides
    the last keys alone, the last tile of queries walks over all keys, and a launch lasts as long as that.
    """
    is_open = not knobs.keys() & {*_CHOOSING, *_BESIDE_TILES}
    return is_open and _suits_three(variant) and hides_last_keys(variant.attention)


def hides_last_keys(attention: Attention) -> bool:
    ends = solve(normalise(attention).mask)
    return ends.may_lo is None and ends.may_hi is not None and ends.tile_may is None


def _has_short_loops(variant: Variant) -> bool:
    """Returns whether a row sees a run of keys that ends on both sides, and each warpgroup can walk over a
    run of its own (`Sm90Roles.own_ranges`): nothing is skipped inside it, drawn or copied for all of them
    together.
    """
    attention = normalise(variant.attention)
    ranges = solve(attention.mask)
    if ranges.may_lo is None or ranges.may_hi is None or ranges.tile_may is not None:
        return False
    return _walks_alone(variant)


def _walks_alone(variant: Variant) -> bool:
    """Returns whether nothing is drawn or copied for all warpgroups together, of rows of one sequence."""
    attention = normalise(variant.attention)
    together = attention.softmax.dropout is not None or attention.q.storage.is_packed
    return not together and not page_of(attention) and _pair_of(variant) is None


def _suits_three(variant: Variant) -> bool:
    """Returns whether three warpgroups with fewer keys are faster than two, though a row sees many keys. Not
    of what was not measured: an epilogue wants a tile of o, and lists and 8 bits want tiles of their own.
    """
    attention = normalise(variant.attention)
    softmax, is_listed = attention.softmax, listing_of(variant.attention) is not None
    is_usual = softmax.form == "softmax" and softmax.v_scale is None and attention.epilogue is None
    is_narrow = any(DType(tensor.dtype).is_narrow for tensor in (attention.k, attention.v))
    if not is_usual or is_listed or is_narrow or not _walks_alone(variant):
        return False
    least, most = sorted((feature(attention.q), feature(attention.v)))
    if most != _WIDEST_SHORT:
        return PIECE < least <= most < _WIDEST_SHORT
    if least != most or not hides_last_keys(attention):
        return False
    _, score = split_scale(attention.score)
    return _looks_up_pairs(score) or (isinstance(score, Dot) and "N" not in attention.lengths)


def _looks_up_pairs(score: Expr) -> bool:
    """Returns whether each score adds a number that is found by its distance: three warpgroups wait for less
    of these at once, and take 0.7 to 0.8 of the time (measured on an H200, 128 columns).
    """
    return any(
        isinstance(node, Load) and any(len(set(axes_of(index))) > 1 for index in node.indices)
        for node in walk(score)
    )


def _differs_by_data(variant: Variant) -> bool:
    """Returns whether a search in a tensor finds the first keys of rows, as of documents: blocks that take
    their tiles by length, of several heads at once, are then 4 % faster (measured on an H200).
    """
    ranges = solve(normalise(variant.attention).mask)
    return ranges.may_lo is not None and any(isinstance(node, Search) for node in walk(ranges.may_lo))


def _pair_of(variant: Variant) -> DType | None:
    attention = normalise(variant.attention)
    dtypes = {tensor.name: DType(tensor.dtype) for tensor in attention.inputs}
    pair = pair_of(attention.score, attention.mask, dtypes)
    return None if pair is None or page_of(attention) else dtypes[pair.tensor]


def _complete(
    config: HopperConfig, tiles: Tiles, knobs: Mapping[str, Knob], variant: Variant
) -> HopperConfig:
    widest, other_warpgroups = _width_of(variant), helpers_of(variant)
    tiles = tiles if config.blocks == 1 else _SHARING_TILES
    config = replace(tiles.without(knobs).of(config), overlap=_overlaps(config, knobs))
    rows = config.tile_q if "tile.q" in knobs else tiles.tile_q or WGMMA_ROWS * CONSUMERS
    fewest = 1 if rows == WGMMA_ROWS else 2
    consumers = config.consumers or min(max(fewest, rows // WGMMA_ROWS), 4)
    tile_q = config.tile_q if "tile.q" in knobs else WGMMA_ROWS * consumers
    if consumers == 1 and "blocks" not in knobs:  # one multiplies while the other computes its softmax
        config = replace(config, blocks=2)
    registers = config.registers
    if not registers:
        few = (
            24 if widest > 128 and other_warpgroups == 1 else 32
        )  # wide heads take all, but one that draws needs more
        helping = _HELPING if widest <= 128 and consumers == 2 else few if consumers == 2 else 32
        if narrow_of(variant.attention):
            helping = CONVERTING_REGISTERS + (8 if widest <= 128 else 0)
        elif copies_of(variant.attention) == "rows":
            helping, _ = row_copies(widest)
        registers = most_registers(consumers, other_warpgroups, helping, config.blocks)
    config = replace(config, consumers=consumers, tile_q=tile_q, registers=registers, persistent=True)
    return config if "warps" in knobs else _with_warps(config, other_warpgroups)


def _width_of(variant: Variant) -> int:
    return max(feature(variant.attention.q), feature(variant.attention.v))


def _with_warps(config: HopperConfig, other_warpgroups: int) -> HopperConfig:
    return replace(config, warps=4 * (config.consumers + other_warpgroups))


def sm90_misfit(config: HopperConfig, variant: Variant, layout: Sm90Layout) -> str | None:
    """Returns why the config cannot run; None if it can."""
    tile_q, tile_kv, consumers = config.tile_q, config.tile_kv, config.consumers
    if tile_q != WGMMA_ROWS * consumers:
        return f"tile.q = {tile_q} is not {WGMMA_ROWS} rows for each of consumers = {consumers}"
    other_warpgroups = layout.other_warpgroups
    if config.warps != 4 * (consumers + other_warpgroups):
        warps, others = config.warps, "4 that copy" + (", 4 that draw" if layout.draws else "")
        others += ", 4 that convert" if layout.narrow else ""
        return f"warps = {warps} is not 4 for each of consumers = {consumers}, and {others}"
    if tile_kv % MMA or tile_kv > WIDEST:
        return f"tile.kv = {tile_kv} is not a multiple of {MMA} up to {WIDEST}"
    if layout.narrow and (reason := narrow_misfit(tile_kv)):
        return reason
    if config.stages < 2 and not layout.narrow:
        return "stages = 1 leaves nothing to copy ahead: two at least"
    if config.blocks > 1 and config.cluster > 1:
        return f"blocks = {config.blocks}: one beside cluster = {config.cluster}"
    page = page_of(variant.attention)
    boxes = tile_kv // gcd(page, tile_kv) * (layout.qk.width // PIECE)
    if page and layout.copies == "boxes" and boxes > _MOST_BOXES and not layout.narrow:
        return (
            f"tile.kv = {tile_kv} and pages of {page} keys make {boxes} boxes, more than {_MOST_BOXES} lanes"
        )
    registers = config.registers
    left, entry = (
        registers_left(consumers, registers, other_warpgroups, config.blocks),
        entry_registers(consumers, other_warpgroups, config.blocks),
    )
    if left < layout.fewest_registers:
        most = most_registers(consumers, other_warpgroups, layout.fewest_registers, config.blocks)
        return f"registers = {registers}: {most} at most, for the launch holds {entry} for each thread"
    if registers < entry:
        return f"registers = {registers}: a thread starts with {entry}, and takes more"
    if tile_kv > (widest := widest_product(entry)):
        starts = f"one product has {widest} columns at most, for a thread starts with {entry} registers"
        return f"tile.kv = {tile_kv}: {starts}"
    needed = sum(sm90_registers(layout, config).values())
    if needed > registers:
        return f"needs about {needed} registers a thread; one that multiplies has {registers}"
    return beyond_shared_memory(layout.shared_memory(config), layout.room_of(config.blocks))


def sm90_registers(layout: Sm90Layout, config: TileConfig) -> dict[str, int]:
    """Registers of a thread that multiplies by value, and an allowance for the rest."""
    return {**layout.registers(config), "other": FREE_REGISTERS}


def sm90_estimate(layout: Sm90Layout, config: TileConfig) -> Estimate:
    """Returns what a block takes: shared memory exactly, registers as far as the plan knows."""
    shape = layout.shape(config)
    tile_q, tile_kv, stages = config.tile_q, config.tile_kv, config.stages
    shapes = {
        "q": f"{shape.q_tiles} x {tile_q}x{layout.qk.width}",
        "k": f"{stages} x {tile_kv}x{layout.qk.width}",
        "v": f"{stages} x {tile_kv}x{layout.v.width}",
        "o": f"{tile_q}x{layout.v.width}",
        "sums": f"{tile_q}x{layout.dv_multiplied}",
        "8 bits": f"{layout.ahead(config)} x {tile_kv}x{layout.narrow.panels * PIECE_OF_BYTES}",
        "vectors": f"{stages} x {layout.vectors} x {tile_kv}",
        "pairs": f"{layout.pair_stages} x {tile_q}x{tile_kv}",
        "drawn": f"{DRAWN_TILES} x {tile_q}x{tile_kv} bytes",
        "columns": f"{stages if layout.key_columns else 1} x {tile_kv}x{COLUMN_BYTES // 2}",
        "barriers": f"{sum(layout.barriers(config).values())}, and what is known of tiles",
    }
    return Estimate(
        buffers=tuple(
            Buffer(name=name, shape=shapes[name], bytes=size)
            for name, size in layout.shared_memory(config).items()
        ),
        registers=sm90_registers(layout, config),
    )
