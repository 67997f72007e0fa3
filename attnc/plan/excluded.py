"""Keys that no query of their sequence keeps, and the tiles that hold some of them.

Their probabilities are 0, but 0 * NaN is NaN: a product with their rows of v, in the backward also of k,
hands every query of the tile what happens to lie in memory that nobody meant to read, such as the padding on
the left of a cache. So their rows are made zero where a tile may hold such keys. Which keys these are follows
from the conditions of the mask that read no query: `kv_idx >= first[b]`, `valid[b, kv_idx]`. That a window
ends before some keys for all queries together is none of them: its kernels would pay for it in every call.
"""

from __future__ import annotations

from dataclasses import replace

from attnc.expr.affine import N, larger, smaller
from attnc.expr.construct import ZERO, add, conj, disj, floordiv, maximum, minimum, mul, sub
from attnc.expr.nodes import TRUE, And, Const, Dim, Expr, Index, Or, Ref, Search, walk
from attnc.expr.simplify import nnf
from attnc.expr.solve import solve
from attnc.plan.ir import Let, Loop, Regions
from attnc.plan.loads import is_nonnegative
from attnc.plan.width import narrowed

_KV_IDX = Index("kv_idx")
TILE = Dim("BLOCK_N")


def kept_by_some(mask: Expr) -> Expr | None:
    """What every key fulfils that some query of its sequence keeps, of whatever head: a condition on kv_idx
    and on values that are the same for the whole sequence. None where the mask implies no such condition.
    """
    normal = nnf(mask)
    conjuncts = normal.operands if isinstance(normal, And) else (normal,)
    free = (_without_queries(conjunct) for conjunct in conjuncts)
    kept = conj(*(c for c in free if _KV_IDX in walk(c)))
    return None if kept == TRUE else kept


def before_the_end(mask: Expr, kept: Expr) -> Expr | None:
    """What of `kept` keys before the end of the last loop over them may lack, None if nothing: that loop ends
    where the first of the mask's own conditions does, such as `kv_idx < end[b]`.
    """
    normal, left = nnf(mask), nnf(kept)
    conjuncts = normal.operands if isinstance(normal, And) else (normal,)
    rest = left.operands if isinstance(left, And) else (left,)
    inside = conj(*(c for c in rest if not (c in conjuncts and _only_ends_keys(c))))
    return None if inside == TRUE else inside


def _only_ends_keys(condition: Expr) -> bool:
    """Whether it holds before a certain position, and nowhere behind it. A search is none: a tensor may be
    shorter than the sequence.
    """
    ranges = solve(condition)
    end = ranges.may_hi
    if end is None or end != ranges.must_hi or any(isinstance(node, Search) for node in walk(end)):
        return False
    return ranges.may_lo is ranges.must_lo is ranges.tile_may is None


def _without_queries(mask: Expr) -> Expr:
    """The mask, in negation normal form, with what depends on the query or its head taken to be true."""
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


def with_edges(loops: Regions, mask: Expr, kept: Expr | None) -> Regions:
    """The loops over keys, with partial ones cut: tiles that may hold keys which no query keeps get loops of
    their own, since a step that makes rows zero costs more.

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

    def named(name: str, value: Expr) -> Expr:
        value = narrowed(value, N)
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
            start = named("kept_lo", minimum(_next_tile(first), stop))
            made.append(replace(loop, stop=start, masked=True, zero_fill=True))
        if ranges.must_hi is not None:
            last = _own_tile(larger(smaller(ranges.must_hi, N), ZERO))
            stop = named("kept_hi", minimum(maximum(last, start), loop.stop))
        made.append(replace(loop, start=start, stop=stop))
        if ranges.must_hi is not None:
            made.append(replace(loop, start=stop, masked=True, zero_fill=True))
    return replace(loops, bounds=tuple(bounds), loops=tuple(made))


def with_fills(loops: Regions, kept: Expr | None) -> Regions:
    """The loops, every partial one of them with rows made zero."""
    if kept is None:
        return loops
    filled = tuple(replace(loop, zero_fill=loop.masked is not False) for loop in loops.loops)
    return replace(loops, loops=filled)


def _own_tile(position: Expr) -> Expr:
    """The start of the tile that the position is in."""
    return mul(floordiv(position, TILE), TILE)


def _next_tile(position: Expr) -> Expr:
    """The start of the first tile that begins at the position or behind it."""
    return _own_tile(add(position, sub(TILE, Const(1))))
