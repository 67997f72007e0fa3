"""Masks that list blocks of keys: `listed(idx, rows = R, keys = K) and rest`.

The list becomes a walk: a tile of queries visits the blocks of its list, and the rest of the mask says, as
ever, which of these tiles are partial. Whatever a list holds, a kernel first makes of it the blocks that it
names, each once and ascending: no key counts twice, and sums have one order. Where gradients are wanted,
another one inverts the lists, so that a tile of keys visits the blocks of queries that name it. Nothing is
added in memory, and the host looks at no entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from math import gcd
from typing import TypeGuard, TypeVar

from attnc.diagnostics import Diagnostic
from attnc.expr.construct import ZERO, add, compare, conj, disj, floordiv, minimum, mul, where
from attnc.expr.nodes import TRUE, And, Binary, Const, Dim, Expr, Index, InList, Load, Ref, walk
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.schedule import Knob, Phase, Schedule, TileConfig
from attnc.model.tensors import Role
from attnc.plan.fitting import unsupported
from attnc.plan.ir import Axis, Let, Loop, Regions
from attnc.plan.ir.lists import ListMaking, ListWalk, Memory
from attnc.plan.loads import is_nonnegative
from attnc.plan.regions import LENGTH, START, partial_test
from attnc.plan.signature import feature, kv_heads, longest, normalise
from attnc.plan.steps import names_of, needed_for
from attnc.plan.target import Target
from attnc.plan.width import ends_of

C = TypeVar("C", bound=TileConfig)
_Q_IDX, _KV_IDX = Index("q_idx"), Index("kv_idx")
_ONE = Const(1)
#: Keys of the smallest tile.
_LEAST_TILE = 16
#: The K/V head of a query head, and of the rows of a tile that has all query heads of it.
_GROUP, KV_HEAD = Binary("//", Index("h"), Dim("G")), Ref("h_kv", "int", natural=True)
#: Keys and columns of what a query gives to gradients of single keys that it selects, of which a product is
#: made; tiles of weights that are on their way, while rows of do and q stay.
PRODUCT_KEYS, PRODUCT_COLUMNS, PRODUCT_STAGES = 64, 128, 3
#: Keys that the list of a program names.
LIST_LENGTH = Ref("list_length", "int", natural=True)
#: Blocks of keys of the longest sequence, and blocks of queries that a list can be of; of the whole call.
BLOCKS, LIST_ROWS = Dim("list_blocks"), Dim("list_rows")


@dataclass(frozen=True, slots=True)
class Listing:
    """A mask that lists blocks: the condition, and what stands beside it."""

    condition: InList
    rest: Expr

    @property
    def keys(self) -> int:
        return self.condition.keys

    @property
    def gathers(self) -> bool:
        """Whether blocks are smaller than tiles can be, or no multiple of them: tiles are gathered from
        several.
        """
        return self.keys % _LEAST_TILE != 0

    @property
    def row_axis(self) -> int | None:
        found = [axis for axis, index in enumerate(self.condition.indices) if _reads_row(index)]
        return found[0] if found else None

    @property
    def rows(self) -> int:
        if self.row_axis is None:
            return 0
        return _block_of_rows(self.condition.indices[self.row_axis]) or 0


def listing_of(attention: Attention) -> Listing | None:
    """Returns what the mask lists, beside the rest of it; None where it lists nothing, or not so that a
    walk could follow (`refuse_lists`).
    """
    conjuncts = attention.mask.operands if isinstance(attention.mask, And) else (attention.mask,)
    listed = [conjunct for conjunct in conjuncts if isinstance(conjunct, InList)]
    if len(listed) != 1:
        return None
    rest = conj(*(conjunct for conjunct in conjuncts if conjunct is not listed[0]))
    return Listing(listed[0], replace(rest, span=attention.mask.span))


def without_list(attention: Attention) -> Attention:
    """Returns the attention with the rest of the mask alone, where that lists blocks."""
    listing = listing_of(attention)
    return attention if listing is None else replace(attention, mask=listing.rest)


def selects_keys(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether the query heads of a K/V head share tiles, all of one query, which has a list."""
    listing = listing_of(attention)
    return listing is not None and listing.rows > 0 and _packs(schedule)


def adds_to_keys(attention: Attention) -> bool:
    """Returns whether queries that select single keys, or a few, by lists of their own have gradients of
    these keys, which are summed in memory.
    """
    listing = listing_of(attention)
    if listing is None or not listing.rows or not listing.gathers:
        return False
    return bool({"k", "v"} & {*attention.grads})


def adds_as_it_comes(attention: Attention, schedule: Schedule) -> bool:
    """Returns whether these sums are atomic: the schedule asks for it."""
    ways = [knob.choices for knob in _sums_of_keys(schedule).values()]
    return adds_to_keys(attention) and ("atomic",) in ways


def _sums_of_keys(schedule: Schedule) -> Mapping[str, Knob]:
    knobs = schedule.phases["backward"]
    return {key: knobs[key] for key in ("accumulate.dk", "accumulate.dv") if key in knobs}


def lists_blocks(attention: Attention) -> bool:
    """Returns whether the mask has a list anywhere."""
    return any(isinstance(node, InList) for node in walk(attention.mask))


def _reads_row(index: Expr) -> bool:
    return any(isinstance(node, Index) and node.name in ("q_idx", "q_pos") for node in walk(index))


def _block_of_rows(index: Expr) -> int | None:
    match index:
        case Index(name="q_idx"):
            return 1
        case Binary(op="//", left=Index(name="q_idx"), right=Const(value=int() as rows)):
            return rows
        case _:
            return None


# --- the walk


def along_lists(
    loops: Regions,
    listing: Listing | None,
    axis: Axis,
    *,
    packs: bool = False,
    bits: bool = False,
    gathers: bool = False,
) -> Regions:
    """Returns the loops over tiles of `axis` as one walk over listed blocks, in which tiles outside of the
    ranges of the rest of the mask are partial: nothing of them is kept. packs: a tile has all query heads of
    a K/V head. bits: the loops stay as they are, and tiles that are in no listed block are skipped. gathers:
    tiles are gathered from several blocks, also where they could divide one.
    """
    if listing is None:
        return loops
    condition, row_axis = listing.condition, listing.row_axis
    extents = condition.extents
    if axis == "kv":
        at: dict[Expr, Expr] = {_Q_IDX: START["q"]}
        at |= {_GROUP: KV_HEAD, Index("h"): KV_HEAD} if packs else {}  # in a group of one they are the same
        indices = tuple(substitute(index, at) for index in condition.indices)
        line = _number(indices, extents[:-1])
        stride, block = add(extents[-1], _ONE), listing.keys
    else:
        at = {_GROUP: KV_HEAD, Index("h"): KV_HEAD} if packs else {}
        others = [n for n in range(len(condition.indices)) if n != row_axis]
        heads = [substitute(condition.indices[n], at) for n in others]
        group = _number(heads, [extents[n] for n in others])
        here = floordiv(START["kv"], Const(listing.keys))
        line = add(mul(group, BLOCKS), here)
        line = line if is_nonnegative(group) else where(compare("<", group, ZERO), Const(-1), line)
        stride, block = add(LIST_ROWS, _ONE), listing.rows
    if bits:
        stride = _rounded(BLOCKS if axis == "kv" else LIST_ROWS, 32)
    bounds = (*loops.bounds, Let(name="list_line", value=line, span=condition.span))
    walked = ListWalk(
        memory=_MEMORY[axis, bits],
        line=Ref("list_line", "int", within=ends_of(line)),
        stride=stride,
        block=block,
        gathers=axis == "kv" and (gathers or listing.gathers),
    )
    if bits:
        kept = tuple(replace(loop, listed=walked) for loop in loops.loops)
        return replace(loops, bounds=bounds, loops=kept)
    loop = Loop(
        start=ZERO,
        stop=LENGTH[axis],
        masked=True if walked.gathers else _is_partial(loops),
        zero_fill=any(loop.zero_fill for loop in loops.loops),
        listed=walked,
    )
    read = set() if isinstance(loop.masked, bool) else names_of(loop.masked)
    # a walk over a list ends where the list does: it reads no other end
    return replace(loops, bounds=tuple(needed_for({"list_line", *read}, bounds)), loops=(loop,))


def along_entries(loops: Regions, listing: Listing, *, packs: bool) -> tuple[Regions, tuple[Let, ...]]:
    """Returns the loops over tiles of keys as a walk over single keys that a list names, and what a program
    finds out first: which list is its own, and N, how many keys that has.
    """
    walked = along_lists(loops, listing, "kv", packs=packs)
    *_, line = (let for let in walked.bounds if let.name == "list_line")
    assert isinstance(line, Let), "which list it is is no load"
    listed = walked.loops[0].listed
    kept = tuple(replace(loop, listed=listed) for loop in loops.loops)
    return replace(loops, loops=kept), (line, Let(name="N", value=LIST_LENGTH))


#: What a loop over tiles of an axis reads: numbers of blocks, or bits.
_MEMORY: Mapping[tuple[Axis, bool], Memory] = {
    ("kv", False): "lists",
    ("q", False): "columns",
    ("kv", True): "list_bits",
    ("q", True): "row_bits",
}


def _is_partial(loops: Regions) -> bool | Expr:
    first = loops.loops[0].start
    if all(loop.masked is False for loop in loops.loops):
        return False if first == ZERO else compare("<", START[loops.axis], first)
    if any(loop.masked is True and loop.guard is not None for loop in loops.loops) and len(loops.loops) == 1:
        return True
    partial = partial_test(loops)
    if partial == Const(True):
        return True
    return partial if first == ZERO else disj(partial, compare("<", START[loops.axis], first))


def _number(indices: Sequence[Expr], sizes: Sequence[Expr]) -> Expr:
    number: Expr = ZERO
    outside: list[Expr] = []
    for index, size in zip(indices, sizes, strict=True):
        number = add(mul(number, size), index)
        if not _is_inside(index, size):
            outside += [] if is_nonnegative(index) else [compare("<", index, ZERO)]
            outside.append(compare(">=", index, size))
    return where(disj(*outside), Const(-1), number) if outside else number


def _is_inside(index: Expr, size: Expr) -> bool:
    match index, size:
        case Index(name="b"), Dim(name="B"):
            return True
        case Index(name="h"), Dim(name="H"):
            return True
        case Const(value=at), Const(value=count):
            return 0 <= at < count
        case (Binary() | Ref()) as head, Dim(name="Hkv") if head in (_GROUP, KV_HEAD):
            return True
        case _:
            return False


# --- what is made first


def list_making(listing: Listing, *, is_distinct: bool) -> ListMaking:
    """Returns what is made of the lists before kernels walk over them. is_distinct: no list names a block
    twice.
    """
    condition = listing.condition
    return ListMaking(
        tensor=condition.tensor,
        extents=condition.extents,
        keys=listing.keys,
        limit=condition.limit,
        rows=listing.rows,
        row_axis=listing.row_axis,
        by_entry=listing.gathers,
        is_distinct=is_distinct,
    )


def list_sizes(attention: Attention, listing: Listing | None) -> tuple[Let, ...]:
    """Returns the sizes that lists take, of those of the call."""
    if listing is None:
        return ()
    blocks = _rounded(longest(attention, Role.KEY), listing.keys)
    sizes = [Let(name=BLOCKS.name, value=blocks)]
    if listing.row_axis is not None:
        extent = listing.condition.extents[listing.row_axis]
        blocks = _rounded(longest(attention, Role.QUERY), listing.rows)
        sizes.append(Let(name=LIST_ROWS.name, value=minimum(extent, blocks)))
    return tuple(sizes)


def _rounded(size: Expr, block: int) -> Expr:
    return floordiv(add(size, Const(block - 1)), Const(block))


# --- tiles that divide blocks


def fit_blocks(found: Sequence[C], variant: Variant, schedule: Schedule, phase: Phase) -> tuple[C, ...]:
    """Returns the configs whose tiles divide the blocks that a mask lists, with tiles that the schedule
    leaves open made to.
    """
    listing = listing_of(variant.attention)
    if listing is None:
        return tuple(found)
    knobs, packs = schedule.phases[phase], _packs(schedule)
    rows = 0 if packs else listing.rows
    keys = 0 if listing.gathers or (packs and phase != "forward") else listing.keys
    return divide_blocks(
        (
            replace(
                config,
                tile_q=config.tile_q if "tile.q" in knobs else gcd(config.tile_q, rows),
                tile_kv=config.tile_kv if "tile.kv" in knobs else gcd(config.tile_kv, keys),
            )
            for config in found
        ),
        (rows, keys),
    )


def divide_blocks(found: Iterable[C], block: tuple[int, int]) -> tuple[C, ...]:
    """Returns the configs whose tiles divide a block of so many queries and keys; 0: any tiles do."""
    rows, keys = block
    fitting = (config for config in found if rows % config.tile_q == 0 and keys % config.tile_kv == 0)
    return tuple(dict.fromkeys(fitting))


# --- what is refused


def refuse_lists(variant: Variant, schedule: Schedule, target: Target) -> Iterator[Diagnostic]:
    """Yields why no kernel of the target can walk over the lists of this mask."""
    attention = variant.attention
    found = [node for node in walk(attention.mask) if isinstance(node, InList)]
    if not found:
        return
    span = found[0].span
    if not target.walks_lists:
        instead = "write a schedule for the target 'triton'"
        yield unsupported(f"lists are not lowered to {schedule.target}", span, "a list of blocks", instead)
        return
    listing = listing_of(attention)
    if listing is None:
        if len(found) > 1:
            label = "the second list of this mask"
            yield unsupported(
                "a mask of two lists is not lowered", found[1].span, label, "join them before the call"
            )
            return
        label, hint = "beside 'or' or below 'not'", "write it beside other conditions with 'and'"
        yield unsupported("a list that not every key has to be in is not lowered", span, label, hint)
        return
    yield from _refuse_indices(listing, schedule, grads=bool(attention.grads))
    if target.lists_are_bits and not schedule.is_decode:
        yield from _refuse_warpgroups(variant, listing, schedule, target)
    elif schedule.is_decode:
        if target.lists_are_bits:
            yield from _refuse_tokens(variant, listing, schedule)
        yield from _refuse_decoding(attention, listing, schedule, splits=target.lists_are_bits)
    yield from _refuse_tiles(listing, schedule)
    yield from _refuse_atomic_sums(attention, schedule)
    if listing.gathers and attention.softmax.form == "stick_breaking":
        label = "keys of small blocks come in the order of the list"
        hint = "list blocks of a multiple of 16 keys, which are brought into order"
        yield unsupported("stick_breaking over listed keys needs them in order", span, label, hint)


#: Queries, or keys, of a warpgroup; columns of which wgmma makes all gradients; keys one of whose multiples
#: tiles have.
_WARPGROUP, _WIDEST, _TILE_KEYS = 64, 128, (32, 48)


def _refuse_warpgroups(
    variant: Variant, listing: Listing, schedule: Schedule, target: Target
) -> Iterator[Diagnostic]:
    """Yields what kernels cannot do whose tiles are of whole warpgroups, and walk over bits."""
    span, instead = listing.condition.span, "write a schedule for the target 'triton'"
    if variant.attention.grads:
        yield from _refuse_gradients(variant, listing, schedule, target)
    if listing.rows % _WARPGROUP or not listing.rows:
        label = f"rows = {listing.rows}" if listing.rows else "one list for all queries"
        message = f"tiles of {schedule.target} have {_WARPGROUP} queries or more, all with one list"
        yield unsupported(message, span, label, f"use a multiple of {_WARPGROUP}", instead)
    if all(listing.keys % keys for keys in _TILE_KEYS):
        hint = f"use a multiple of {_TILE_KEYS[0]} or {_TILE_KEYS[1]}"
        message = f"blocks of {listing.keys} keys are not lowered to {schedule.target}"
        yield unsupported(message, span, f"keys = {listing.keys}", hint, instead)
    for key, most in (("consumers", listing.rows // 64), ("cluster", 1)):
        knob = schedule.forward.get(key)
        if knob is not None and any(choice and most % choice for choice in knob.choices if _is_count(choice)):
            of_cluster = "blocks of a cluster walk together"
            label = "a tile's queries have one list" if key == "consumers" else of_cluster
            message = f"'{key}' asks for queries of several lists in a tile"
            yield unsupported(message, knob.span, label, "remove it")


def _is_count(choice: object) -> TypeGuard[int]:
    return type(choice) is int


def _refuse_gradients(
    variant: Variant, listing: Listing, schedule: Schedule, target: Target
) -> Iterator[Diagnostic]:
    """Yields what kernels for gradients cannot do, where wgmma does not make them, or tiles cross blocks."""
    attention, span = variant.attention, listing.condition.span
    instead = "write a schedule for the target 'triton'"
    wide = max(feature(attention.q), feature(attention.v)) > _WIDEST
    others = [name for name in attention.grads if name not in ("q", "k", "v")]
    phases: tuple[Phase, ...] = ("backward", "dq", "dkdv")
    knobs = [knob for phase in phases if (knob := schedule.phases[phase].get("accumulate.dq")) is not None]
    of_one = [
        knob
        for knob in knobs  # turns are refused apart
        if knob.choices not in (("two_pass",), ("ordered",))
        and not all(target.adds_packed_dq(variant, str(way)) for way in knob.choices)
    ]
    reads_head = [index for index in listing.condition.indices if Index("h") in walk(index)]
    message = ""
    if wide:
        message = (
            f"gradients of more than {_WIDEST} columns beside lists are not lowered to {schedule.target}"
        )
    elif attention.softmax.form == "stick_breaking":
        message = f"gradients of stick_breaking beside lists are not lowered to {schedule.target}"
    elif others:
        message = f"a gradient of '{others[0]}' beside lists is not lowered to {schedule.target}"
    elif of_one:
        span, size = of_one[0].span, 2 * _WARPGROUP
        blocks = f"blocks of no multiple of {size} keys"
        if feature(attention.q) <= _WARPGROUP:
            blocks = f"smaller blocks than {size} x {size}"
        lists = "lists" if shares_ds(attention) else f"lists of {blocks}"
        message = f"beside {lists}, gradients of {schedule.target} are of two passes"
        instead = "write 'accumulate.dq = two_pass'"
    elif any(index not in (_GROUP, Index("h")) for index in reads_head) or (
        Index("h") in reads_head and kv_heads(normalise(attention)) != Dim("H")
    ):
        message = (
            f"gradients beside lists that differ in a group of heads are not lowered to {schedule.target}"
        )
    elif listing.keys % _WARPGROUP:
        message = f"tiles of {schedule.target} have {_WARPGROUP} keys where they make dk and dv, of one block"
        instead = f"use a multiple of {_WARPGROUP} keys, or {instead}"
    if message:
        yield unsupported(
            message, span, "here" if span is not listing.condition.span else "the list", instead
        )


def shares_ds(attention: Attention) -> bool:
    """Returns whether listed blocks have tiles of keys for two warpgroups that make dk, dv and dq together,
    and of queries, where few columns leave each half of the rows of dq.
    """
    listing = listing_of(attention)
    rows = 2 * _WARPGROUP if feature(attention.q) <= _WARPGROUP else _WARPGROUP
    return listing is None or not (listing.keys % (2 * _WARPGROUP) or listing.rows % rows)


def _packs(schedule: Schedule) -> bool:
    return "pack" in schedule.forward and schedule.forward["pack"].choices[0] == "gqa"


def _refuse_tokens(variant: Variant, listing: Listing, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields what kernels cannot do that take the keys of a list for all that there are."""
    attention, span = variant.attention, listing.condition.span
    instead = "write a schedule for the target 'triton'"
    exprs = (attention.score, attention.softmax.sink, attention.softmax.v_scale)
    read = {node for expr in exprs if expr is not None for node in walk(expr)}
    placed = {Index("kv_idx"), Index("kv_pos"), Index("q_pos"), Dim("N")}
    if listing.keys != 1:
        what, label = f"lists of blocks of {listing.keys} keys are not lowered", f"keys = {listing.keys}"
    elif not _packs(schedule):
        what, label = "tiles of queries with lists of their own are not lowered", "write 'pack = gqa'"
    elif listing.rows and kv_heads(normalise(attention)) == Dim("H"):
        what, label = "lists of heads that share no keys are not lowered", "64 rows of a tile for one head"
    elif (knob := schedule.forward.get("warp_split")) is not None and "kv" in knob.choices:
        what, label, span = "lists shared by warps are not lowered", "remove it", knob.span
    elif listing.rest != TRUE:
        what, label, span = (
            "a mask beside lists of keys is not lowered",
            "more than the list",
            listing.rest.span,
        )
    elif placed & read:
        what, label, span = "a score by the place of listed keys is not lowered", "here", attention.score.span
    elif attention.lengths or not (attention.q.storage.is_plain and attention.k.storage.is_plain):
        what, label = "lists of keys of other storages, or shorter sequences, are not lowered", "the list"
    elif DType(attention.k.dtype).is_narrow or DType(attention.v.dtype).is_narrow:
        what, label = "lists of keys of 8 bits are not lowered", "the list"
    else:
        return
    yield unsupported(f"{what} to {schedule.target}", span or listing.condition.span, label, instead)


def _refuse_decoding(
    attention: Attention, listing: Listing, schedule: Schedule, *, splits: bool
) -> Iterator[Diagnostic]:
    """splits: whether several programs can share a list."""
    knob = schedule.forward.get("split.kv")
    if knob is not None and knob.choices != (1,) and not splits:
        label, hint = "a list has one program", "remove it"
        yield unsupported("listed blocks are not split", knob.span, label, hint)
    reads_head = [index for index in listing.condition.indices if Index("h") in walk(index)]
    shared = (_GROUP, Index("h")) if kv_heads(normalise(attention)) == Dim("H") else (_GROUP,)
    if _packs(schedule) and any(index not in shared for index in reads_head):
        label, hint = "lists differ between these heads", "write 'h // G' for a list of each K/V head"
        span = schedule.forward["pack"].span
        yield unsupported("a tile of all heads of a group has one list", span, label, hint)


def _refuse_atomic_sums(attention: Attention, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields what a schedule with atomic sums of selected keys cannot ask for: one kernel makes all
    gradients.
    """
    if not (adds_as_it_comes(attention, schedule) and schedule.is_decode):
        return
    ways, first = _sums_of_keys(schedule), "one kernel adds to dk and dv of keys that queries select"
    others = [name for name in ("k", "v") if name in attention.grads and f"accumulate.d{name}" not in ways]
    for knob in ways.values():
        if others or knob.choices != ("atomic",):
            key = f"accumulate.d{others[0]}" if others else knob.key
            yield unsupported(first, knob.span, "in one way", f"write '{key} = atomic', too")
            return
    said = (schedule.knobs.get("dkdv", {}), *schedule.listed.get("dkdv", ()))
    for knob in islice((knob for knobs in said for knob in knobs.values()), 1):
        label = "dk and dv have none of their own"
        hint = "remove 'dkdv { }': tiles are those of 'backward { }', or 'dq { }'"
        yield unsupported(first, knob.span, label, hint)


def _refuse_indices(listing: Listing, schedule: Schedule, *, grads: bool) -> Iterator[Diagnostic]:
    condition, span = listing.condition, listing.condition.span
    of_rows = [index for index in condition.indices if _reads_row(index)]
    if len(of_rows) > 1 or (of_rows and _block_of_rows(of_rows[0]) is None):
        place = next((index.span for index in of_rows if index.span), span)
        label = "kernels know 'q_idx' and 'q_idx // 64', along one axis"
        yield unsupported("lists of other queries are not lowered", place, label)
    if not of_rows and grads and not schedule.is_decode:
        hint = "give the lists an axis of blocks of queries, as in 'rows = 64'"
        message = "gradients beside one list for all queries are not lowered"
        yield unsupported(message, span, "reads no 'q_idx'", hint)
    if condition.limit is not None and not _is_limit(condition.limit, condition):
        label = "of each list, or one number for the call"
        yield unsupported(
            "a count of other things than lists is not lowered", condition.limit.span or span, label
        )


def _is_limit(limit: Expr, condition: InList) -> bool:
    match limit:
        case Const():
            return True
        case Load(indices=indices):
            return indices in ((), condition.indices)
        case _:
            return False


def _refuse_tiles(listing: Listing, schedule: Schedule) -> Iterator[Diagnostic]:
    sizes = {"tile.q": (listing.rows, "rows"), "tile.kv": (listing.keys, "keys")}
    if _packs(schedule):
        sizes["tile.q"] = (0, "rows")
        if listing.gathers:
            sizes["tile.kv"] = (0, "keys")
    for size, name in sizes.values():
        if size and size & -size < 16:
            span = listing.condition.span
            message = f"blocks of {size} {'queries' if name == 'rows' else name} are not lowered"
            hints = ["use a multiple of 16"]
            what = "the heads of a query fill a tile" if name == "rows" else "tiles are gathered"
            hints.append(f"or write 'loops = [kv], pack = gqa', where {what}")
            yield unsupported(message, span, f"{name} = {size}", *hints)
            return
    phases: tuple[Phase, ...] = ("forward", "backward", "dq", "dkdv")
    for phase in phases[:1] if _packs(schedule) else phases:  # gradients gather the keys of a query
        for key, (size, name) in sizes.items():
            knob = schedule.phases[phase].get(key)
            if knob is not None and size:
                yield from _refuse_tile(knob, size, name)


def _refuse_tile(knob: Knob, size: int, name: str) -> Iterator[Diagnostic]:
    numbers = [choice for choice in knob.choices if isinstance(choice, int)]
    if numbers and all(size % number for number in numbers):
        fits = reduce(gcd, (64, size))
        message = f"tiles of {numbers[0]} {name} do not divide the listed blocks of {size}"
        yield unsupported(message, knob.span, f"a block has {size} {name}", f"write '{knob.key} = {fits}'")
