"""Mask -> loops: the closed-form solve of `expr.solve`, rounded to tiles.

For one tile of the outer axis, positions of the inner axis fall into [lo, full_lo) partial, [full_lo,
full_hi) full, [full_hi, hi)
partial, and nothing else is visited. Tiles start at multiples of the tile size, so lo and full_hi round down,
full_lo rounds up.
An empty full range makes the two partial ranges meet; an empty hull (hi <= lo) makes all three empty.
"""

from __future__ import annotations

from attnc.expr.facts import at_least, larger, smaller
from attnc.expr.nodes import TRUE, Const, Dim, Expr, Index, Ref
from attnc.expr.simplify import add, compare, floordiv, mul, sub, where
from attnc.expr.solve import Ranges, Var, solve
from attnc.plan.ir import Axis, Let, Loop, Regions
from attnc.plan.loads import is_nonnegative
from attnc.source import Span

ZERO, ONE = Const(0), Const(1)
TILE: dict[Axis, Expr] = {"q": Dim("BLOCK_M"), "kv": Dim("BLOCK_N")}
LENGTH: dict[Axis, Expr] = {"q": Dim("M"), "kv": Dim("N")}
VARIABLE: dict[Axis, Var] = {"q": "q_idx", "kv": "kv_idx"}


def regions(mask: Expr, axis: Axis, span: Span | None) -> tuple[Regions, bool]:
    """Loops over `axis` for one tile of the other axis, and whether partial tiles must test the length of
    the key sequence.

    The test can go when the mask itself ends every row before the end: then the hull needs no clamping.
    """
    ranges = solve(mask, var=VARIABLE[axis])
    length = LENGTH[axis]
    bounds: list[Let] = []

    def named(text: str, value: Expr) -> Expr:
        """The value by name, unless it is a name or a number already."""
        if isinstance(value, Const | Dim | Ref):
            return value
        bounds.append(Let(name=text, value=value, span=span))
        return Ref(text, "int", natural=is_nonnegative(value))

    lo = named("lo", _align_down(_from_zero(ranges.may_lo), axis))
    hi = named("hi", _up_to(ranges.may_hi, length))
    tail = axis == "q" or ranges.may_hi is None or not at_least(length, ranges.may_hi)
    if not ranges.any_full:
        return Regions(axis=axis, bounds=tuple(bounds), loops=(_partial(lo, hi, ranges),)), tail
    full_lo = named("full_lo", _align_up(_from_zero(ranges.must_lo), axis) if ranges.left_partial else lo)
    full_hi = _align_down(larger(_up_to(ranges.must_hi, length), ZERO), axis)
    full_hi = full_hi if full_lo == ZERO else larger(full_hi, full_lo)
    if axis == "q":  # rows of a kv tile that is cut short are never full
        whole = compare("<=", add(Index("kv_lo"), TILE["kv"]), LENGTH["kv"])
        full_hi = where(whole, full_hi, full_lo)
    full_hi = named("full_hi", full_hi)
    loops = [Loop(start=full_lo, stop=full_hi, masked=False), _partial(full_hi, hi, ranges)]
    if ranges.left_partial:
        loops.insert(0, _partial(lo, smaller(full_lo, hi), ranges))
    return Regions(axis=axis, bounds=tuple(bounds), loops=tuple(loops)), tail


def _partial(start: Expr, stop: Expr, ranges: Ranges) -> Loop:
    return Loop(
        start=start, stop=stop, masked=True, guard=None if ranges.tile_may == TRUE else ranges.tile_may
    )


def _from_zero(start: Expr | None) -> Expr:
    return ZERO if start is None else larger(start, ZERO)


def _up_to(stop: Expr | None, length: Expr) -> Expr:
    return length if stop is None else smaller(stop, length)


def _align_down(value: Expr, axis: Axis) -> Expr:
    return value if value == ZERO else mul(floordiv(value, TILE[axis]), TILE[axis])


def _align_up(value: Expr, axis: Axis) -> Expr:
    return value if value == ZERO else mul(floordiv(add(value, sub(TILE[axis], ONE)), TILE[axis]), TILE[axis])
