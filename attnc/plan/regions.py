"""Mask -> loops: the closed-form solve of `expr.solve`, rounded to tiles, and the tiles that hold keys which
no query keeps.

For one tile of the outer axis, positions of the inner axis fall into [lo, full_lo) partial, [full_lo,
full_hi) full, [full_hi, hi) partial, and nothing else is visited; tiles start at multiples of the tile
size. Where only one side can be partial there are two loops, and the full one carries no mask code. Where
both sides can (windows, documents) the ranges are short and a loop each would spend its time filling
pipelines: one loop then tests which of its tiles are full (measured on an H200: 10 to 22 % faster).

Probabilities of keys that no query of their sequence keeps are 0, but 0 * NaN is NaN: a product with
their rows of v, in the backward also of k, hands every query of the tile what happens to lie in memory
that nobody meant to read, such as the padding on the left of a cache. So their rows are made zero where a
tile may hold such keys. Which keys these are follows from the conditions of the mask that read no query:
`kv_idx >= first[b]`, `valid[b, kv_idx]`. That a window ends before some keys for all queries together is
none of them: its kernels would pay for it in every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attnc.expr.affine import N, affine, at_least, larger, normalize, smaller
from attnc.expr.construct import ZERO, add, compare, conj, disj, floordiv, maximum, minimum, mul, sub, where
from attnc.expr.interval import classify
from attnc.expr.nodes import TRUE, And, Call, Compare, Const, Dim, Expr, Index, InList, Or, Ref, Search, walk
from attnc.expr.simplify import nnf, substitute
from attnc.expr.solve import Ranges, Var, solve
from attnc.model.attention import Attention
from attnc.plan.decay import Decay
from attnc.plan.ir import Axis, Let, Loop, Regions
from attnc.plan.ir.kernel import Segments
from attnc.plan.loads import is_nonnegative
from attnc.plan.width import ends_of, narrow_bound
from attnc.source import Span

TILE: dict[Axis, Expr] = {"q": Dim("BLOCK_M"), "kv": Dim("BLOCK_N")}
START: dict[Axis, Expr] = {"q": Index("q_lo"), "kv": Index("kv_lo")}
LENGTH: dict[Axis, Expr] = {"q": Dim("M"), "kv": Dim("N")}
VARIABLE: dict[Axis, Var] = {"q": "q_idx", "kv": "kv_idx"}


def regions(
    mask: Expr,
    axis: Axis,
    span: Span | None,
    *,
    padded: bool = False,
    outruns: bool = False,
    decay: Decay | None = None,
) -> tuple[Regions, bool]:
    """Loops over `axis` for one tile of the other axis, and whether partial tiles must test the length of
    the key sequence.

    The test can go when the mask itself ends every row before the end: then the hull needs no clamping.
    padded: whatever lies past the end of either axis does no harm, so that it makes no tile partial. outruns:
    the tile may lie past the end of a sequence, whose length along `axis` is then 0 and ends every loop.
    decay: of the score, by which keys far behind are left out.
    """
    ranges = _without_far(solve(mask, var=VARIABLE[axis]), axis, decay)
    length = LENGTH[axis]
    bounds: list[Let] = []

    def name_value(text: str, value: Expr) -> Expr:
        if isinstance(value, Const | Dim | Ref):
            return value
        value = narrow_bound(value, length)
        if outruns and text in ("hi", "full_hi"):
            value = _clamp_end(value, length)
        bounds.append(Let(name=text, value=value, span=span))
        return Ref(text, "int", natural=is_nonnegative(value), within=ends_of(value))

    lo = name_value("lo", _align_down(_from_zero(ranges.may_lo), axis))
    hi = name_value("hi", _up_to(ranges.may_hi, length))
    tail = axis == "q" or ranges.may_hi is None or not at_least(length, _drop_searches(ranges.may_hi))

    def make_regions(*loops: Loop) -> tuple[Regions, bool]:
        return Regions(axis=axis, bounds=tuple(bounds), loops=loops), tail

    if not ranges.any_full:
        return make_regions(_partial(lo, hi, ranges))
    must_lo, must_hi = _from_zero(ranges.must_lo), _up_to(ranges.must_hi, length)
    if padded and ranges.must_hi is None and ranges.may_hi is None:
        if not ranges.left_partial:
            return make_regions(Loop(start=lo, stop=hi, masked=False))
        full_lo = name_value("full_lo", smaller(_align_up(must_lo, axis), hi))
        return make_regions(_partial(lo, full_lo, ranges), Loop(start=full_lo, stop=hi, masked=False))
    if axis == "q" and not padded:  # rows of a kv tile that is cut short are never full
        whole = compare("<=", add(Index("kv_lo"), TILE["kv"]), LENGTH["kv"])
        must_hi = where(whole, must_hi, ZERO)
    if ranges.left_partial:
        full_lo, full_hi = name_value("full_lo", must_lo), name_value("full_hi", must_hi)
        start = START[axis]
        partial = disj(compare("<", start, full_lo), compare(">", add(start, TILE[axis]), full_hi))
        return make_regions(replace(_partial(lo, hi, ranges), masked=partial))
    full_hi = _align_down(larger(must_hi, ZERO), axis)
    full_hi = name_value("full_hi", full_hi if lo == ZERO else larger(full_hi, lo))
    return make_regions(Loop(start=lo, stop=full_hi, masked=False), _partial(full_hi, hi, ranges))


def _without_far(ranges: Ranges, axis: Axis, decay: Decay | None) -> Ranges:
    if decay is None:
        return ranges
    if axis == "kv":
        return replace(ranges, may_lo=larger(_from_zero(ranges.may_lo), decay.start()))
    return replace(ranges, may_hi=_up_to(decay.stop(), _up_to(ranges.may_hi, LENGTH[axis])))


def partial_test(loops: Regions) -> Expr:
    """Returns whether the tile at hand is partial, for a text that walks over the tiles of all loops in one:
    they follow one upon the other.
    """
    first, last = loops.loops[0], loops.loops[-1]
    if len(loops.loops) == 1:
        return Const(last.masked) if isinstance(last.masked, bool) else last.masked
    return compare("<" if first.masked is True else ">=", START[loops.axis], last.start)


def tests_tiles(loops: Regions) -> bool:
    """Returns whether a loop tests which of its tiles are partial."""
    return any(not isinstance(loop.masked, bool) for loop in loops.loops)


def guard_of(loops: Regions) -> Expr | None:
    """Returns whether a tile is visited at all, in such a text; None if every one is."""
    guards = [loop.guard for loop in loops.loops if loop.guard is not None]
    return disj(*guards) if guards else None


def _partial(start: Expr, stop: Expr, ranges: Ranges) -> Loop:
    return Loop(
        start=start, stop=stop, masked=True, guard=None if ranges.tile_may == TRUE else ranges.tile_may
    )


def _drop_searches(stop: Expr) -> Expr:
    """Returns the bound without its searches: a tensor reads 0 past its end, which may be the value looked
    for.
    """
    return substitute(stop, {node: Ref("any", "int") for node in walk(stop) if isinstance(node, Search)})


def _from_zero(start: Expr | None) -> Expr:
    return ZERO if start is None else larger(start, ZERO)


def _clamp_end(stop: Expr, length: Expr) -> Expr:
    match stop:
        case Call(function="min", args=args) if length in args:
            return stop
        case _ if any(isinstance(node, Index) for node in walk(stop)):
            return minimum(stop, length)
        case _:
            return stop


def _up_to(stop: Expr | None, length: Expr) -> Expr:
    return length if stop is None else smaller(stop, length)


def _align_up(position: Expr, axis: Axis) -> Expr:
    return position if position == ZERO else _align_down(add(position, sub(TILE[axis], Const(1))), axis)


def _align_down(position: Expr, axis: Axis) -> Expr:
    return position if position == ZERO else mul(floordiv(position, TILE[axis]), TILE[axis])


# --- keys that no query keeps


_KV_IDX = Index("kv_idx")


def kept_by_some(mask: Expr) -> Expr | None:
    """Returns a condition that holds for every key which some query of its sequence keeps, in any head. It
    reads kv_idx and values that are the same for the whole sequence. None if the mask implies no such
    condition.
    """
    normal = nnf(mask)
    conjuncts = normal.operands if isinstance(normal, And) else (normal,)
    free = (_without_queries(conjunct) for conjunct in conjuncts)
    kept = conj(*(c for c in free if _KV_IDX in walk(c)))
    return None if kept == TRUE else kept


def before_the_end(mask: Expr, kept: Expr) -> Expr | None:
    """Returns the part of `kept` that may fail for keys before the end of the last loop, None if none may:
    that loop ends where the first condition of the mask itself does, such as `kv_idx < end[b]`.
    """
    normal, left = nnf(mask), nnf(kept)
    conjuncts = normal.operands if isinstance(normal, And) else (normal,)
    rest = left.operands if isinstance(left, And) else (left,)
    inside = conj(*(c for c in rest if not (c in conjuncts and _only_ends_keys(c))))
    return None if inside == TRUE else inside


def _only_ends_keys(condition: Expr) -> bool:
    """Returns whether it holds before a certain position, and nowhere behind it. A search is none: a tensor
    may be shorter than the sequence.
    """
    ranges = solve(condition)
    end = ranges.may_hi
    if end is None or end != ranges.must_hi or any(isinstance(node, Search) for node in walk(end)):
        return False
    return ranges.may_lo is ranges.must_lo is ranges.tile_may is None


def _without_queries(mask: Expr) -> Expr:
    """Returns the mask, in negation normal form, with what depends on the query or its head taken
    to be true.
    """
    match mask:
        case And(operands=operands):
            return conj(*map(_without_queries, operands))
        case Or(operands=operands):
            return disj(*map(_without_queries, operands))
        case _:
            return TRUE if _differs_between_queries(mask) else mask


def _differs_between_queries(expr: Expr) -> bool:
    return any(
        (isinstance(node, Index) and node.name in ("q_idx", "q_pos", "h"))
        or (isinstance(node, Ref) and "q" in node.axes)
        for node in walk(expr)
    )


#: The last row of a sequence.
_LAST: Mapping[Expr, Expr] = {Index("q_pos"): sub(N, Const(1)), Index("q_idx"): sub(Dim("M"), Const(1))}


def shows_more_past_the_end(mask: Expr) -> bool:
    """Returns whether rows behind the last, which tiles of queries may have, may see a key that no row sees.
    They cannot where each condition that holds in one of them holds in the last row, too.
    """
    return _shows_more(nnf(mask))


def _shows_more(mask: Expr) -> bool:
    match mask:
        case And(operands=operands) | Or(operands=operands):
            return any(map(_shows_more, operands))
        case InList():  # a tile of queries has one list
            return False
        case _ if not any(node in _LAST for node in walk(mask)):
            return False
        case _ if classify(normalize(substitute(mask, _LAST)))[1] == TRUE:
            return False
        case Compare(op="<" | "<=" | ">" | ">=" as op, left=left, right=right) if left.type == "int":
            pairs = affine(sub(left, right)).terms
            rest = [atom for atom, _ in pairs if atom != Index("q_idx")]
            if any(node in _LAST for atom in rest for node in walk(atom)):
                return True
            pace = dict(pairs).get(Index("q_idx"), 0)
            return pace < 0 if op in ("<", "<=") else pace > 0
        case _:
            return True


def with_edges(loops: Regions, mask: Expr, kept: Expr | None) -> Regions:
    """Returns the loops over keys, with partial ones cut: tiles that may hold keys which no query keeps get
    loops of their own, since a step that makes rows zero costs more.

    Tiles from `kept_lo` to `kept_hi` hold no such keys. Nothing is cut where the mask is that condition alone
    and ends in a partial loop, which then consists of such a tile, or where no tile is known to be free of
    them.
    """
    if kept is None:
        return loops
    ranges = solve(kept)
    if not ranges.any_full or (len(loops.loops) > 1 and nnf(mask) == kept):
        return with_fills(loops, kept)
    bounds = list(loops.bounds)

    def name_value(name: str, value: Expr) -> Expr:
        value = narrow_bound(value, N)
        bounds.append(Let(name=name, value=value, span=mask.span))
        return Ref(name, "int", natural=is_nonnegative(value))

    made: list[Loop] = []
    for loop in loops.loops:
        if loop.masked is False:
            made.append(loop)
            continue
        start, stop = loop.start, loop.stop
        if ranges.must_lo is not None:
            first = maximum(smaller(ranges.must_lo, N), loop.start)  # which is the start of a tile
            start = name_value("kept_lo", minimum(_align_up(first, "kv"), stop))
            made.append(replace(loop, stop=start, masked=True, zero_fill=True))
        if ranges.must_hi is not None:
            last = _align_down(larger(smaller(ranges.must_hi, N), ZERO), "kv")
            stop = name_value("kept_hi", minimum(maximum(last, start), loop.stop))
        made.append(replace(loop, start=start, stop=stop))
        if ranges.must_hi is not None:
            made.append(replace(loop, start=stop, masked=True, zero_fill=True))
    return replace(loops, bounds=tuple(bounds), loops=tuple(made))


def with_fills(loops: Regions, kept: Expr | None) -> Regions:
    """Returns the loops, every partial one of them with rows made zero."""
    if kept is None:
        return loops
    filled = tuple(replace(loop, zero_fill=loop.masked is not False) for loop in loops.loops)
    return replace(loops, loops=filled)


# --- a part of the keys


def within(loops: Regions, lo: Expr, hi: Expr) -> Regions:
    """Returns the loops cut to the keys lo .. hi - 1: the first begins no earlier, the last ends no later,
    the borders between them move into that range. lo is not below the first loop's start.
    """
    last = len(loops.loops) - 1
    return replace(
        loops,
        loops=tuple(
            replace(
                loop,
                start=lo if i == 0 else larger(loop.start, lo),
                stop=hi if i == last else smaller(loop.stop, hi),
            )
            for i, loop in enumerate(loops.loops)
        ),
    )


def segments_of(attention: Attention, loops: Regions) -> Segments | None:
    """Returns the segments of the keys that a tile of rows visits; None where the spec asks for no order."""
    if attention.segment is None:
        return None
    return Segments(size=attention.segment_keys, lo=loops.loops[0].start, hi=loops.loops[-1].stop)
