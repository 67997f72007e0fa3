"""Mask -> loops: the closed-form solve of `expr.solve`, rounded to tiles.

For one tile of the outer axis, positions of the inner axis fall into [lo, full_lo) partial,
[full_lo, full_hi) full, [full_hi, hi) partial, and nothing else is visited; tiles start at multiples of the
tile size. Where only one side can be partial there are two loops, and the full one carries no mask code.
Where both sides can (windows, documents) the ranges are short and a loop each would spend its time filling
pipelines: one loop then tests which of its tiles are full (measured on an H200: 10 to 22 % faster).
"""

from __future__ import annotations

from dataclasses import replace

from attnc.expr.affine import at_least, larger, smaller
from attnc.expr.construct import add, compare, disj, floordiv, minimum, mul, sub, where
from attnc.expr.nodes import TRUE, Call, Const, Dim, Expr, Index, Ref, Search, walk
from attnc.expr.simplify import substitute
from attnc.expr.solve import Ranges, Var, solve
from attnc.plan.ir import Axis, Let, Loop, Regions
from attnc.plan.loads import is_nonnegative
from attnc.plan.width import ends_of, narrowed
from attnc.source import Span

ZERO = Const(0)
TILE: dict[Axis, Expr] = {"q": Dim("BLOCK_M"), "kv": Dim("BLOCK_N")}
START: dict[Axis, Expr] = {"q": Index("q_lo"), "kv": Index("kv_lo")}
LENGTH: dict[Axis, Expr] = {"q": Dim("M"), "kv": Dim("N")}
VARIABLE: dict[Axis, Var] = {"q": "q_idx", "kv": "kv_idx"}


def regions(
    mask: Expr, axis: Axis, span: Span | None, *, padded: bool = False, outruns: bool = False
) -> tuple[Regions, bool]:
    """Loops over `axis` for one tile of the other axis, and whether partial tiles must test the length of
    the key sequence.

    The test can go when the mask itself ends every row before the end: then the hull needs no clamping.
    padded: whatever lies past the end of either axis does no harm, so that it makes no tile partial. outruns:
    the tile may lie past the end of a sequence, whose length along `axis` is then 0 and ends every loop.
    """
    ranges = solve(mask, var=VARIABLE[axis])
    length = LENGTH[axis]
    bounds: list[Let] = []

    def named(text: str, value: Expr) -> Expr:
        """The value by name, unless it is a name or a number already."""
        if isinstance(value, Const | Dim | Ref):
            return value
        value = narrowed(value, length)
        if outruns and text in ("hi", "full_hi"):
            value = _ended(value, length)
        bounds.append(Let(name=text, value=value, span=span))
        return Ref(text, "int", natural=is_nonnegative(value), within=ends_of(value))

    lo = named("lo", _align_down(_from_zero(ranges.may_lo), axis))
    hi = named("hi", _up_to(ranges.may_hi, length))
    tail = axis == "q" or ranges.may_hi is None or not at_least(length, _unsearched(ranges.may_hi))

    def made(*loops: Loop) -> tuple[Regions, bool]:
        return Regions(axis=axis, bounds=tuple(bounds), loops=loops), tail

    if not ranges.any_full:
        return made(_partial(lo, hi, ranges))
    must_lo, must_hi = _from_zero(ranges.must_lo), _up_to(ranges.must_hi, length)
    if padded and ranges.must_hi is None and ranges.may_hi is None:
        if not ranges.left_partial:
            return made(Loop(start=lo, stop=hi, masked=False))
        full_lo = named("full_lo", smaller(_align_up(must_lo, axis), hi))
        return made(_partial(lo, full_lo, ranges), Loop(start=full_lo, stop=hi, masked=False))
    if axis == "q" and not padded:  # rows of a kv tile that is cut short are never full
        whole = compare("<=", add(Index("kv_lo"), TILE["kv"]), LENGTH["kv"])
        must_hi = where(whole, must_hi, ZERO)
    if ranges.left_partial:
        full_lo, full_hi = named("full_lo", must_lo), named("full_hi", must_hi)
        start = START[axis]
        partial = disj(compare("<", start, full_lo), compare(">", add(start, TILE[axis]), full_hi))
        return made(replace(_partial(lo, hi, ranges), masked=partial))
    full_hi = _align_down(larger(must_hi, ZERO), axis)
    full_hi = named("full_hi", full_hi if lo == ZERO else larger(full_hi, lo))
    return made(Loop(start=lo, stop=full_hi, masked=False), _partial(full_hi, hi, ranges))


def partial_test(loops: Regions) -> Expr:
    """Whether the tile at hand is partial, for a text that walks over the tiles of all loops in one: they
    follow one upon the other.
    """
    first, last = loops.loops[0], loops.loops[-1]
    if len(loops.loops) == 1:
        return Const(last.masked) if isinstance(last.masked, bool) else last.masked
    return compare("<" if first.masked is True else ">=", START[loops.axis], last.start)


def guard_of(loops: Regions) -> Expr | None:
    """Whether a tile is visited at all, in such a text; None if every one is."""
    guards = [loop.guard for loop in loops.loops if loop.guard is not None]
    return disj(*guards) if guards else None


def _partial(start: Expr, stop: Expr, ranges: Ranges) -> Loop:
    return Loop(
        start=start, stop=stop, masked=True, guard=None if ranges.tile_may == TRUE else ranges.tile_may
    )


def _unsearched(stop: Expr) -> Expr:
    """The bound without its searches: a tensor reads 0 past its end, which may be the value looked for."""
    return substitute(stop, {node: Ref("any", "int") for node in walk(stop) if isinstance(node, Search)})


def _from_zero(start: Expr | None) -> Expr:
    return ZERO if start is None else larger(start, ZERO)


def _ended(stop: Expr, length: Expr) -> Expr:
    """The bound, not past the length even where the tile is: `smaller` takes tiles to lie in sequences."""
    match stop:
        case Call(function="min", args=args) if length in args:
            return stop
        case _ if any(isinstance(node, Index) for node in walk(stop)):
            return minimum(stop, length)
        case _:
            return stop


def _up_to(stop: Expr | None, length: Expr) -> Expr:
    return length if stop is None else smaller(stop, length)


def _align_up(value: Expr, axis: Axis) -> Expr:
    return (
        value
        if value == ZERO
        else mul(floordiv(add(value, sub(TILE[axis], Const(1))), TILE[axis]), TILE[axis])
    )


def _align_down(value: Expr, axis: Axis) -> Expr:
    return value if value == ZERO else mul(floordiv(value, TILE[axis]), TILE[axis])
