"""Variant + schedule -> the decode kernel: few query rows against many keys, bound by the memory's speed.

The query heads that share a KV head fill the rows of a tile (`pack = gqa`), so that K and V are read once for
all of them, and programs share the keys of a sequence (`split.kv`, Flash-Decoding); the template `combine`
joins what they found. A fixed number of splits, or splits of a fixed size, cut a sequence in the same
places whatever else is in the batch: the bits of its result do not depend on the batch. With a fixed size
they do not change either when a cache is given more room, and a prefix is cut like the sequences that
continue it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnc.expr.affine import Q_HI, Q_LO, affine
from attnc.expr.construct import ZERO, mul
from attnc.expr.interval import SIZE
from attnc.expr.nodes import TRUE, Binary, Call, Const, Dim, Expr, Index, Load, Ref, children, uses
from attnc.expr.simplify import make, substitute
from attnc.expr.solve import solve
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import Choice, ForwardConfig, Schedule
from attnc.plan.columns import plan_column_scales
from attnc.plan.device import DEVICES
from attnc.plan.epilogue import plan_epilogue
from attnc.plan.error_bound import error_bound
from attnc.plan.fitting import keys_of_split
from attnc.plan.ir import Decode, Grid, Let, Softmax, expressions_of
from attnc.plan.ir.kernel import Pack, Regions, Split
from attnc.plan.ir.module import ListedRows, Module
from attnc.plan.layout import Layout
from attnc.plan.listed_rows import TILE_ROWS, along_rows
from attnc.plan.lists import KV_HEAD, LISTED, Listing, along_entries, along_lists
from attnc.plan.loads import LoadNames
from attnc.plan.regions import kept_by_some, regions, segments_of, with_fills, within
from attnc.plan.signature import kv_heads, parts
from attnc.plan.softmax import LONGEST, plan_key_scale, plan_softmax, unified_max
from attnc.plan.steps import (
    IN_BOUNDS,
    count_stored_rows,
    dims_of,
    kv_head_of,
    lengths,
    make_step,
    named_bounds,
    outruns,
    rows,
    sequences,
    sizes,
)
from attnc.plan.steps import program as program_of
from attnc.plan.target import Target
from attnc.plan.targets import target_of
from attnc.plan.words import with_words

#: The query head of each row of a tile.
ROW_HEAD = Ref("h", "int", ("q",), natural=True, within=(0, SIZE))
#: The KV head of a query head.
_GROUP = Binary("//", Index("h"), Dim("G"))
SPLIT_LO, SPLIT_HI = Ref("split_lo", "int"), Ref("split_hi", "int")
#: Most splits that `split.kv = auto` makes of a sequence.
MOST_SPLITS = 128
#: Major capabilities of devices whose tensor cores read tiles where they lie.
_STAGING = tuple(
    sorted({device.capability // 10 for device in DEVICES.values() if device.has_mma_from_shared})
)


def plan_decode(
    variant: Variant,
    attention: Attention,
    schedule: Schedule,
    listing: Listing | None,
    listed_rows: ListedRows | None,
    together: int = 1,
) -> Decode:
    """Returns the decode kernel of a normalised attention; the schedule is known to be lowerable.

    listed_rows: what makes lists of rows of memory, of which the kernel takes all; together: queries that
    walk together over the blocks that any of them lists.
    """
    target = target_of(schedule.target)
    choices = target.configs(variant, schedule)
    default = choices[0]
    layout = target.layout(variant, schedule, default)
    packed = attention.q.storage.is_packed and target.decodes_packed_rows
    in_tile = together if listed_rows is None else listed_rows.queries
    alone = listed_rows is not None or (listing is not None and listing.rows > 0) or packed
    folded, pack = attention, _pack_rows(attention, default, alone=alone, queries=in_tile)
    packs = pack is not None
    if packs:
        attention = vary_heads(attention)
    names = LoadNames.of(attention, "q" if outruns(attention, "kv") else None)
    places = rows(attention, names, pages=listed_rows is None)
    lines = lengths(attention, names)
    walk = _walk_keys(attention, target, names, listing, listed_rows, packs=packs, together=together)
    loops, kept = walk.loops, walk.kept
    walks_segments = target.walks_segments(variant, schedule)
    segments = segments_of(attention, loops) if walks_segments else None
    split = None
    if not walks_segments and (attention.segment is not None or _splits(choices) > 1):
        split = _split_keys(variant, attention, target, choices, layout, walk, together)
    if packs:
        softmax, score = _plan_packed_softmax(attention, folded, default, names)
    else:
        softmax, score = plan_softmax(attention, default, names)
    v_scale = plan_key_scale(attention, names)
    of_tile = plan_epilogue(attention, names.apart()) if packs else None
    epilogue = plan_epilogue(folded, names)
    finishing = () if epilogue is None else epilogue.expressions
    unified = unified_max(attention, default)
    step = make_step(
        attention,
        score,
        IN_BOUNDS if walk.tail or (listing is not None and listing.gathers) else TRUE,
        loops,
        softmax,
        names,
        "kv",
        kept=kept,
        always_fills=loops.are_short and target.always_fills,
        v_scale=v_scale,
        scales=plan_column_scales(attention, names, packs=packs, listed=walk.by_entry),
    )
    step = with_words(step) if target.reads_words(layout) else step
    outer = tuple(fetch for fetch in names.fetches if fetch.axes == ("q",))
    program = program_of(names, (*lines, *walk.found))
    kv_head = kv_head_of(attention)
    heads = (kv_heads(attention), *((pack.group,) if pack else ()))
    heads += listing.condition.extents if listing is not None and walk.reads_bits else ()
    used = (*expressions_of(program, outer, loops, step), *softmax.expressions, *finishing, kv_head, *heads)
    return Decode(
        name=f"{attention.name}_forward",
        grid=Grid(over="q", persistent=False, longest_first=False, sequences=sequences(attention)),
        kv_head=kv_head,
        dims=sizes(attention, dims_of(used)),
        program=program,
        outer=outer,
        regions=loops if split is None else within(loops, SPLIT_LO, SPLIT_HI),
        step=step,
        softmax=softmax,
        configs=choices,
        shared=tuple(target.count_shared_bytes(variant, config, "forward", layout) for config in choices),
        layout=layout,
        bound=error_bound(
            attention,
            choices,
            softmax,
            unified,
            (1 if attention.segment else _splits(choices)) + target.count_joined(choices, layout),
            cuts_summands=target.cuts_summands,
        ),
        rows=places,
        stored=count_stored_rows(attention),
        epilogue=epilogue,
        of_tile=of_tile,
        pack=pack,
        split=split,
        parts=parts(attention),
        unified=unified,
        segments=segments,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeyWalk:
    """How a program walks over keys. tail: whether partial tiles test the length of the sequence; kept: the
    keys that some query keeps; found: what the program finds out of lists first; by_entry: whether the keys
    are those that a list names; reads_bits: whether it walks over blocks that have a bit each.
    """

    loops: Regions
    tail: bool
    kept: Expr | None
    found: tuple[Let, ...]
    by_entry: bool

    @property
    def reads_bits(self) -> bool:
        listed = self.loops.loops[0].listed
        return listed is not None and listed.memory == "list_bits"


def _walk_keys(
    attention: Attention,
    target: Target,
    names: LoadNames,
    listing: Listing | None,
    listed_rows: ListedRows | None,
    *,
    packs: bool,
    together: int,
) -> _KeyWalk:
    cut = outruns(attention, "kv")
    loops, tail = regions(attention.mask, "kv", attention.mask.span, outruns=cut)
    kept = kept_by_some(attention.mask)
    loops = with_fills(loops, kept)
    by_entry = listing is not None and target.takes_listed_rows and together == 1
    found: tuple[Let, ...] = ()
    if by_entry and listed_rows is not None:
        loops, found = along_rows(loops, listed_rows)
    elif listing is not None and by_entry:  # which lists of single keys are not
        loops, found = along_entries(loops, listing, packs=packs)
    else:
        bits = target.lists_are_bits
        loops = along_lists(loops, listing, "kv", packs=packs, bits=bits, queries=together)
    return _KeyWalk(loops=named_bounds(loops, names), tail=tail, kept=kept, found=found, by_entry=by_entry)


def _split_keys(
    variant: Variant,
    attention: Attention,
    target: Target,
    choices: tuple[ForwardConfig, ...],
    layout: Layout | None,
    walk: _KeyWalk,
    together: int,
) -> Split:
    loops = walk.loops
    staged = tuple(target.count_staged_bytes(variant, config) for config in choices)
    lo, hi, listed = loops.loops[0].start, loops.loops[-1].stop, loops.loops[0].listed
    if listed is not None and not target.lists_are_bits:  # keys of the blocks that a list names, in its order
        hi = mul(replace(LISTED, within=(-1, SIZE // listed.block + 1)), Const(listed.block))
    return Split(
        lo=lo,
        hi=hi,
        in_turn=target.splits_in_turn and attention.softmax.form != "stick_breaking" and not walk.reads_bits,
        by_block=walk.reads_bits and together > 1 and not any(map(keys_of_split, choices)),
        max_visible_keys=max_visible_keys(attention.mask),
        staged=staged,
        staging=_STAGING if any(staged) else (),
        idle_gain=target.idle_gain(attention),
        most=MOST_SPLITS,
        trips=target.partial_trips(layout),
        few=target.few_tiles(layout),
        block_share=target.block_share(attention, layout),
        short=target.short_walk(choices, layout),
        segment=variant.attention.segment_keys,
    )


def _plan_packed_softmax(
    attention: Attention, folded: Attention, default: ForwardConfig, names: LoadNames
) -> tuple[Softmax, Expr | None]:
    """Plans the softmax of tiles whose rows are of several heads. folded: the attention of one head."""
    if attention.segment is None:
        softmax, score = plan_softmax(attention, default, names)
    else:
        softmax, score = plan_softmax(folded, default, names, _move_to_row)
    if softmax.dropout is None:
        return softmax, score
    return replace(softmax, dropout=replace(softmax.dropout, head=_move_to_row(softmax.dropout.head))), score


def max_visible_keys(mask: Expr) -> int | None:
    """Returns the most keys that a row can see, if that is the same number wherever the row is: 129 where it
    sees 128 before its own, None for a plain causal mask.
    """
    ranges = solve(mask, var="kv_idx")
    if ranges.may_hi is None:
        return None
    row: dict[Expr, Expr] = {Q_HI: Q_LO}
    gaps = (
        affine(substitute(hi, row)) - affine(substitute(lo, row))
        for lo in _operands(ranges.may_lo or ZERO, "max")
        for hi in _operands(ranges.may_hi, "min")
    )
    return min((max(gap.const, 0) for gap in gaps if not gap.terms), default=None)


def _operands(expr: Expr, function: str) -> tuple[Expr, ...]:
    match expr:
        case Call(function=name, args=args) if name == function:
            return tuple(operand for arg in args for operand in _operands(arg, function))
        case _:
            return (expr,)


def pack_heads(attention: Attention, *, alone: bool) -> Pack | None:
    """Returns the group of query heads; None where every head has K and V of its own, unless a tile has rows
    of one query alone: then it is a group of one.
    """
    match kv_heads(attention):
        case Dim(name="H"):
            return Pack(group=Const(1), alone=True) if alone else None
        case Const(value=1):
            return Pack(group=Dim("H"), alone=alone)
        case _:
            return Pack(group=Dim("G"), alone=alone)


def _pack_rows(
    attention: Attention,
    config: ForwardConfig,
    *,
    alone: bool,
    queries: int,
) -> Pack | None:
    """Returns which query heads are the rows of a tile, None where those of a tile have one. alone: tiles
    have no rows of other queries, which have lists or sequences of their own, but of so many together.
    """
    pack = pack_heads(attention, alone=alone) if config.pack == "gqa" else None
    return pack if pack is None or queries == 1 else replace(pack, padded=TILE_ROWS // queries)


def decodes_packed_rows(module: Module) -> bool:
    """Returns whether every packed query has tiles of its own, which are numbered by its row in memory."""
    kernel = module.kernel
    is_alone = isinstance(kernel, Decode) and kernel.pack is not None and kernel.pack.alone
    return is_alone and kernel.grid.sequences is not None and module.lists is None


def vary_heads(attention: Attention) -> Attention:
    """Returns the attention in which h varies along the rows of a tile."""
    softmax = attention.softmax
    return replace(
        attention,
        score=_move_to_row(attention.score),
        mask=_move_to_row(attention.mask),
        epilogue=attention.epilogue and _move_to_row(attention.epilogue),
        softmax=replace(
            softmax,
            sink=softmax.sink and _move_to_row(softmax.sink),
            v_scale=softmax.v_scale
            and (softmax.v_scale if softmax.scales_columns else _move_to_row(softmax.v_scale)),
        ),
    )


def _move_to_row(expr: Expr) -> Expr:
    if isinstance(expr, Load) and "kv_idx" in uses(expr):
        expr = substitute(expr, {_GROUP: KV_HEAD})
    if not children(expr):
        return ROW_HEAD if expr == Index("h") else expr
    return make(expr, tuple(map(_move_to_row, children(expr))))


def has_fixed_splits(kernel: Decode) -> bool:
    """Returns whether any config cuts sequences into splits of a fixed number of keys."""
    return kernel.split is not None and any(map(keys_of_split, kernel.configs))


def _splits(choices: tuple[ForwardConfig, ...]) -> int:
    return max(map(_split_count, choices))


def _split_count(config: ForwardConfig) -> int:
    match config.split_kv:
        case int() as count:
            return count
        case Choice(args={"size": int() as size}):
            return int(LONGEST) // size
        case _:
            return MOST_SPLITS
