"""Solves comparisons of sorted inputs: the index at which a value is reached is found by a binary search."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from attnc.expr.affine import affine, normalize
from attnc.expr.arithmetic import ZERO
from attnc.expr.facts import TILE, at_least, relate
from attnc.expr.interval import bounds, is_scalar
from attnc.expr.logic import compare, conj, where
from attnc.expr.nodes import CompareOp, Const, Expr, Index, Load, Search, walk
from attnc.expr.runs import NONE, Run
from attnc.expr.simplify import substitute
from attnc.expr.solution import Solution, Var, unsolved


def solve_sorted(op: CompareOp, load: Load, x: Expr, var: Var) -> Solution:
    """T[var + offset] <op> x for ascending T and x free of var: a binary search for the bounds of x.

    Positions that fall outside T read 0. They are never in `must`; `may` is widened to them if 0 <op> x may
    hold.
    """
    *prefix, last = load.indices
    size, length = load.extents[-1], TILE[var][2]
    offset = affine(last) - affine(Index(var))
    if not all(map(is_scalar, (*prefix, offset.expr))):
        return unsolved(compare(op, load, x))

    def first(side: Literal["lower", "upper"], value: Expr | None) -> Expr | None:
        """The first position with T >= value (lower) or T > value (upper)."""
        if value is None:
            return None
        search = Search(side, load.tensor, tuple(map(normalize, prefix)), load.extents, value)
        return (affine(search) - offset).expr

    limits = bounds(x)
    starts_inside = at_least(offset.expr, ZERO)
    ends_inside = at_least((affine(size) - offset).expr, length)
    if op in ("<", "<="):
        side: Literal["lower", "upper"] = "lower" if op == "<" else "upper"
        may = Run(hi=first(side, limits.hi))
        must = Run(None if starts_inside else (-offset).expr, first(side, limits.lo))
        if may.hi is not None and limits.hi is not None and not ends_inside:
            overhangs = relate(">", (affine(length) + offset).expr, size)
            reads_zero = conj(overhangs, compare(op, _zero(load), limits.hi))
            may = Run(hi=where(reads_zero, length, may.hi))
        return Solution(may, must if limits.lo is not None else NONE)

    side = "lower" if op == ">=" else "upper"
    may = Run(lo=first(side, limits.lo))
    must = Run(first(side, limits.hi), None if ends_inside else (affine(size) - offset).expr)
    if may.lo is not None and limits.lo is not None and not starts_inside:
        reads_zero = conj(relate("<", offset.expr, ZERO), compare(op, _zero(load), limits.lo))
        may = Run(lo=where(reads_zero, ZERO, may.lo))
    return Solution(may, must if limits.hi is not None else NONE)


def searched_once(equality: Solution) -> Solution:
    """An equality with a sorted load, its `must` in terms of the searches of `may`.

    may is [lower(a), upper(b)) for the bounds a <= b of the other side, must is [lower(b), upper(a)). That is
    the same where a = b, and empty elsewhere: no element is equal to two numbers.
    """
    lower, upper = _search_of(equality.must.lo, "lower"), _search_of(equality.must.hi, "upper")
    if lower is None or upper is None or lower.value == upper.value:
        return equality
    if replace(lower, side="upper") != replace(upper, value=lower.value):
        return equality
    must = Run(
        lo=substitute(equality.must.lo or ZERO, {lower: replace(lower, value=upper.value)}),
        hi=substitute(equality.must.hi or ZERO, {upper: replace(upper, value=lower.value)}),
        guard=conj(equality.must.guard, relate("==", lower.value, upper.value)),
    )
    return Solution(equality.may, must, equality.exact)


def _search_of(bound: Expr | None, side: Literal["lower", "upper"]) -> Search | None:
    """The one search in a bound, if it is of this kind."""
    found = [] if bound is None else [node for node in walk(bound) if isinstance(node, Search)]
    return found[0] if len(found) == 1 and found[0].side == side else None


def _zero(load: Load) -> Const:
    return Const(0 if load.type == "int" else 0.0)
