"""Why no kernel of a target can walk over the lists of a mask: each refusal at its place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import islice
from math import gcd
from typing import TypeGuard

from attnc.diagnostics import Diagnostic
from attnc.expr.nodes import Const, Dim, Expr, Index, InList, Load, walk
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.schedule import Choice, Knob, Phase, Schedule
from attnc.plan.fitting import several_values, unsupported
from attnc.plan.listed_rows import (
    lists_rows,
    queries_together,
    reads_by_row,
    unites_blocks,
    unites_lists,
)
from attnc.plan.lists import (
    GROUP,
    KV_HEAD,
    WARPGROUP,
    Listing,
    adds_as_it_comes,
    block_of_rows,
    listing_of,
    packs_heads,
    reads_row,
    shares_ds,
    sums_of_keys,
    walks_packed_lists,
)
from attnc.plan.signature import feature, kv_heads, normalise
from attnc.plan.target import Target
from attnc.source import Span


def refuse_lists(variant: Variant, schedule: Schedule, target: Target) -> Iterator[Diagnostic]:
    """Yields why no kernel of the target can walk over the lists of this mask."""
    found = [node for node in walk(variant.attention.mask) if isinstance(node, InList)]
    listing = listing_of(variant.attention)
    yield from _refuse_union(variant.attention, listing, schedule)
    if not found:
        return
    if listing is not None:
        yield from _refuse_listing(variant, listing, schedule, target)
    elif len(found) > 1:
        label = "the second list of this mask"
        message = "a mask of two lists is not lowered"
        yield unsupported(message, found[1].span, label, "join them before the call")
    else:
        label, hint = "beside 'or' or below 'not'", "write it beside other conditions with 'and'"
        message = "a list that not every key has to be in is not lowered"
        yield unsupported(message, found[0].span, label, hint)


def _refuse_union(attention: Attention, listing: Listing | None, schedule: Schedule) -> Iterator[Diagnostic]:
    if not unites_lists(schedule):
        return
    knob, instead = schedule.forward["lists"], "remove 'lists = union': each query has tiles of its own"
    if len(knob.choices) > 1:
        yield several_values(knob)
        return
    label = ""
    if listing is None:
        label = "the mask has no list"
    elif not (schedule.is_decode and packs_heads(schedule)):
        label, instead = "tiles have one head", "write 'loops = [kv], pack = gqa'"
    elif listing.rows != 1 or (listing.gathers and listing.keys != 1):
        label = "of lists of single keys, or of blocks of a multiple of 16, one for each query"
    elif listing.keys != 1 and attention.softmax.form == "stick_breaking":
        label = "of stick_breaking, beside blocks"
    elif "M" in attention.lengths:
        label = "beside 'length M': all queries of a tile have lists"
    elif unites_blocks(attention, schedule) and _has_rows_of_two(schedule):
        label = "of blocks, in tiles of one warpgroup"
    elif queries_together(attention) == 1:
        label = f"of at most {WARPGROUP // 2} heads that share keys, as a number"
    if label:
        yield unsupported("a union of lists is not lowered here", knob.span, label, instead)


def _has_rows_of_two(schedule: Schedule) -> bool:
    knob = schedule.forward.get("tile.q")
    return knob is not None and knob.choices != (WARPGROUP,)


def _refuse_listing(
    variant: Variant, listing: Listing, schedule: Schedule, target: Target
) -> Iterator[Diagnostic]:
    attention, span = variant.attention, listing.condition.span
    by_rows = lists_rows(attention, schedule, target)
    if not by_rows:
        yield from _refuse_indices(listing, schedule, grads=bool(attention.grads))
    if target.lists_are_bits and not target.takes_listed_rows:
        yield from _refuse_keys(attention, listing, schedule)
    if target.walks_for_groups and not schedule.is_decode:
        yield from _refuse_warpgroups(variant, listing, schedule, target)
    elif schedule.is_decode:
        if target.takes_listed_rows:
            yield from _refuse_tokens(variant, listing, schedule, by_rows=by_rows)
        elif by_rows and (misplaced := _find_misplaced(attention, listing)) is not None:
            what, label, place = misplaced
            message = f"{what} to {schedule.target} in packed sequences"
            instead = "give sequences an axis B, and lengths: 'length M = ...'"
            yield unsupported(message, place or span, label, instead)
        elif by_rows and attention.softmax.dropout is not None:
            label = "draws by the key's place in its sequence, and lists have rows of memory"
            message = "dropout beside single keys of packed sequences is not lowered"
            instead = "give sequences an axis B, and lengths: 'length M = ...'"
            yield unsupported(message, attention.softmax.span or span, label, instead)
        yield from _refuse_decoding(attention, listing, schedule, splits=target.lists_are_bits)
    if not listing.gathers or target.takes_listed_rows or not target.lists_are_bits:
        yield from _refuse_tiles(listing, schedule, gathers=by_rows or listing.gathers)
    yield from _refuse_atomic_sums(attention, schedule)
    if (by_rows or listing.gathers) and attention.softmax.form == "stick_breaking":
        label = "keys of small blocks come in the order of the list"
        hint = "list blocks of a multiple of 16 keys, which are brought into order"
        if not listing.gathers:
            label = "tiles have rows of memory, wherever these are in a sequence"
            hint = "write a schedule for the target 'triton'"
        yield unsupported("stick_breaking over listed keys needs them in order", span, label, hint)


def _refuse_keys(attention: Attention, listing: Listing, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields refusals of kernels whose tiles lie in one block, and which decode no packed queries."""
    span, instead = listing.condition.span, "write a schedule for the target 'triton'"
    if listing.gathers:
        message = f"tiles of {schedule.target} have keys of one listed block"
        hint = "list blocks of a multiple of 16 keys"
        yield unsupported(message, span, f"keys = {listing.keys}", hint, f"or {instead}")
    if walks_packed_lists(attention) and schedule.is_decode:
        message = f"packed queries with lists of their own are not lowered to {schedule.target}"
        yield unsupported(message, attention.q.storage.span, "packed here", instead)
    if attention.softmax.form == "stick_breaking" and attention.grads and not schedule.is_decode:
        message = f"gradients of stick_breaking beside lists are not lowered to {schedule.target}"
        yield unsupported(message, span, "the list", instead)


#: Columns of which wgmma makes all gradients; keys one of whose multiples tiles have.
_WIDEST, _TILE_KEYS = 128, (32, 48)


def _refuse_warpgroups(
    variant: Variant, listing: Listing, schedule: Schedule, target: Target
) -> Iterator[Diagnostic]:
    """Yields refusals of kernels whose tiles are those of whole warpgroups, and which walk over bits."""
    span, instead = listing.condition.span, "write a schedule for the target 'triton'"
    if variant.attention.grads:
        yield from _refuse_gradients(variant, listing, schedule, target)
    if listing.rows % WARPGROUP or not listing.rows:
        label = f"rows = {listing.rows}" if listing.rows else "one list for all queries"
        message = f"tiles of {schedule.target} have {WARPGROUP} queries or more, all with one list"
        yield unsupported(message, span, label, f"use a multiple of {WARPGROUP}", instead)
    if all(listing.keys % keys for keys in _TILE_KEYS):
        hint = f"use a multiple of {_TILE_KEYS[0]} or {_TILE_KEYS[1]}"
        message = f"blocks of {listing.keys} keys are not lowered to {schedule.target}"
        yield unsupported(message, span, f"keys = {listing.keys}", hint, instead)
    for key, most in (("consumers", listing.rows // WARPGROUP), ("cluster", 1)):
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
        span, size = of_one[0].span, 2 * WARPGROUP
        blocks = f"blocks of no multiple of {size} keys"
        if feature(attention.q) <= WARPGROUP:
            blocks = f"smaller blocks than {size} x {size}"
        lists = "lists" if shares_ds(attention) else f"lists of {blocks}"
        message = f"beside {lists}, gradients of {schedule.target} are of two passes"
        instead = "write 'accumulate.dq = two_pass'"
        if target.adds_packed_dq(variant, "atomic"):
            message, instead = f"{message}, or dq is atomic", f"{instead} or 'accumulate.dq = atomic'"
    elif any(index not in (GROUP, Index("h")) for index in reads_head) or (
        Index("h") in reads_head and kv_heads(normalise(attention)) != Dim("H")
    ):
        message = (
            f"gradients beside lists that differ in a group of heads are not lowered to {schedule.target}"
        )
    elif listing.keys % WARPGROUP:
        message = f"tiles of {schedule.target} have {WARPGROUP} keys where they make dk and dv, of one block"
        instead = f"use a multiple of {WARPGROUP} keys, or {instead}"
    if message:
        yield unsupported(
            message, span, "here" if span is not listing.condition.span else "the list", instead
        )


#: How a row of memory says what belongs to its key.
_READ_PAGES = "read pages, as in scale[table[b, kv_idx // 64], kv_idx % 64, d // 64]"


def _refuse_tokens(
    variant: Variant, listing: Listing, schedule: Schedule, *, by_rows: bool
) -> Iterator[Diagnostic]:
    """Yields refusals of kernels for which the keys of a list are all keys. by_rows: the kernels of lists of
    rows.
    """
    attention, span = variant.attention, listing.condition.span
    instead = "write a schedule for the target 'triton'"
    are_narrow = DType(attention.k.dtype).is_narrow or DType(attention.v.dtype).is_narrow
    if not packs_heads(schedule):
        what, label = "tiles of queries with lists of their own are not lowered", "write 'pack = gqa'"
    elif (listing.rows or by_rows) and kv_heads(normalise(attention)) == Dim("H"):
        what, label = "lists of heads that share no keys are not lowered", "64 rows of a tile for one head"
    elif (knob := schedule.forward.get("warp_split")) is not None and "kv" in knob.choices:
        what, label, span = "lists shared by warps are not lowered", "remove it", knob.span
    elif not unites_blocks(attention, schedule) and (misplaced := _find_misplaced(attention, listing)):
        what, label, span = misplaced
    elif are_narrow and unites_lists(schedule):
        what, label = "a union of lists of keys of 8 bits is not lowered", "remove 'lists = union'"
    elif by_rows and not reads_by_row(attention):
        what = "columns that are read by the place of listed keys are not lowered"
        label, span = "tiles have rows of memory", attention.score.span
        instead = f"{_READ_PAGES}, or {instead}"
    else:
        return
    yield unsupported(f"{what} to {schedule.target}", span or listing.condition.span, label, instead)


def _find_misplaced(attention: Attention, listing: Listing) -> tuple[str, str, Span | None] | None:
    """Returns the first part of an attention that kernels of whole lists cannot read: a message, a label and
    the place; None if there is none.
    """
    if differing := [expr for expr in _read_by_lists(listing) if _differs_by_head(expr, attention)]:
        what = "lists, or masks beside them, that differ between query heads are not lowered"
        return what, "heads that share keys have one list", differing[0].span
    softmax = attention.softmax
    v_scale = None if softmax.scales_columns else softmax.v_scale
    read = {node for x in (attention.score, softmax.sink, v_scale) if x is not None for node in walk(x)}
    by_columns = {node for x in attention.column_reads for node in walk(x)}
    placed = {Index("kv_pos"), Index("q_pos"), Dim("N")}
    if (placed | {Index("kv_idx")}) & read or placed & by_columns:
        label = "tiles have rows of memory, wherever these are in a sequence"
        return "a score by the place of listed keys is not lowered", label, attention.score.span
    if attention.q.storage.is_packed and {Index("b"), Index("q_idx")} & read:
        what = "a score by the place of packed queries beside lists is not lowered"
        return what, "all rows are queries of one sequence", attention.score.span
    return None


def _read_by_lists(listing: Listing) -> Iterator[Expr]:
    limit = listing.condition.limit
    yield from (*listing.condition.indices, *(() if limit is None else (limit,)), listing.rest)


def _differs_by_head(expr: Expr, attention: Attention) -> bool:
    shared: dict[Expr, Expr] = {GROUP: KV_HEAD}
    if kv_heads(normalise(attention)) == Dim("H"):
        shared[Index("h")] = KV_HEAD
    return Index("h") in walk(substitute(expr, shared))


def _refuse_decoding(
    attention: Attention, listing: Listing, schedule: Schedule, *, splits: bool
) -> Iterator[Diagnostic]:
    knob = schedule.forward.get("split.kv")
    if knob is not None and knob.choices != (1,) and not splits:
        if attention.grads:
            label = "gradients are made of what one program leaves"
            yield unsupported("lists are not split beside gradients", knob.span, label, "remove it")
        elif any(isinstance(choice, Choice) and "size" in choice.args for choice in knob.choices):
            label, hint = "a list has fewer keys", "write 'split.kv = auto', or a number of splits"
            yield unsupported("splits of lists have no fixed size", knob.span, label, hint)
    reads_head = [index for index in listing.condition.indices if Index("h") in walk(index)]
    shared = (GROUP, Index("h")) if kv_heads(normalise(attention)) == Dim("H") else (GROUP,)
    if packs_heads(schedule) and any(index not in shared for index in reads_head):
        label, hint = "lists differ between these heads", "write 'h // G' for a list of each K/V head"
        span = schedule.forward["pack"].span
        yield unsupported("a tile of all heads of a group has one list", span, label, hint)


def _refuse_atomic_sums(attention: Attention, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields refusals of keys that a schedule with atomic sums of selected keys cannot have, since one kernel
    makes all gradients.
    """
    if not (adds_as_it_comes(attention, schedule) and schedule.is_decode):
        return
    ways, first = sums_of_keys(schedule), "one kernel adds to dk and dv of keys that queries select"
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
    of_rows = [index for index in condition.indices if reads_row(index)]
    if len(of_rows) > 1 or (of_rows and block_of_rows(of_rows[0]) is None):
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


def _refuse_tiles(listing: Listing, schedule: Schedule, *, gathers: bool) -> Iterator[Diagnostic]:
    sizes = {"tile.q": (listing.rows, "rows"), "tile.kv": (listing.keys, "keys")}
    if packs_heads(schedule):
        sizes["tile.q"] = (0, "rows")
        if gathers:
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
    for phase in phases[:1] if packs_heads(schedule) else phases:  # gradients gather the keys of a query
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
