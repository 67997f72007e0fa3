"""Solves a mask for one index: which positions may be kept by a tile of the other, in closed form.

Every comparison in which the index stands once becomes a half-line, `and` intersects runs, `or` takes
their hull: the loop bounds of a kernel are computed by a few scalar operations from run-time sizes, and
no list of blocks is ever made. What cannot be solved is left to the test of the partial loop. Sound by
construction: `may` holds every position that some element of the tile keeps, `must` only positions that
all elements keep. Comparisons of sorted inputs become half-lines too: a binary search finds the index at
which a value is reached.

A run is [lo, hi) if its guard holds, else empty; ends are scalar expressions, None where unbounded.
Positions count from 0, so a `hi` of 0 empties a run and a `lo` of the length does too: that is how a
guard is folded into an end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, TypeAlias

from attnc.effort import memo
from attnc.expr.affine import (
    TILE,
    Affine,
    affine,
    at_least,
    larger,
    lies_inside,
    normalize,
    relate,
    shift,
    smaller,
)
from attnc.expr.construct import (
    MIRRORED,
    ZERO,
    compare,
    conj,
    disj,
    floordiv,
    maximum,
    minimum,
    negate,
    number,
    sub,
    where,
)
from attnc.expr.finite import is_finite
from attnc.expr.interval import (
    I64,
    NEAR,
    Interval,
    Range,
    bounds,
    bounds_of_sum,
    classify,
    far_terms,
    is_scalar,
    range_of,
    range_of_sum,
    strays,
    within_64_bits,
)
from attnc.expr.nodes import (
    FALSE,
    TRUE,
    And,
    Binary,
    Call,
    Compare,
    CompareOp,
    Const,
    Expr,
    Index,
    Load,
    Or,
    Ref,
    Search,
    uses,
    walk,
)
from attnc.expr.simplify import nnf, substitute

# --- runs of positions


@dataclass(frozen=True, slots=True)
class Run:
    """Positions lo .. hi - 1 where `guard` holds, else none; None: from 0, up to the length."""

    lo: Expr | None = None
    hi: Expr | None = None
    guard: Expr = TRUE

    @property
    def is_empty(self) -> bool:
        if self.guard == FALSE:
            return True
        return self.hi is not None and at_least(self.lo or ZERO, self.hi)

    @property
    def is_all(self) -> bool:
        return self.lo is None and self.hi is None and self.guard == TRUE

    def guarded_lo(self, length: Expr) -> Expr | None:
        """Returns lo, or the length where the guard fails."""
        return self.lo if self.guard == TRUE else where(self.guard, self.lo or ZERO, length)

    def guarded_hi(self, length: Expr) -> Expr | None:
        """Returns hi, or 0 where the guard fails."""
        return self.hi if self.guard == TRUE else where(self.guard, self.hi or length, ZERO)

    def is_shorter_than(self, count: int) -> bool:
        if self.is_empty:
            return True
        if self.lo is None or self.hi is None:
            return False
        return at_least(shift(self.lo, count - 1), self.hi)


ALL = Run()
NONE = Run(guard=FALSE)


def intersect(a: Run, b: Run) -> Run:
    lo = a.lo if b.lo is None else b.lo if a.lo is None else larger(a.lo, b.lo)
    hi = a.hi if b.hi is None else b.hi if a.hi is None else smaller(a.hi, b.hi)
    return Run(lo, hi, conj(a.guard, b.guard))


def hull(a: Run, b: Run, length: Expr) -> tuple[Run, bool]:
    """Returns the smallest run found that holds both, and whether it holds nothing else."""
    if a.is_empty or b.is_empty:
        return (b if a.is_empty else a), True
    if a.is_all or b.is_all:
        return ALL, True
    if a.guard == b.guard:
        lo = None if a.lo is None or b.lo is None else smaller(a.lo, b.lo)
        hi = None if a.hi is None or b.hi is None else larger(a.hi, b.hi)
        return Run(lo, hi, a.guard), a.lo == b.lo or a.hi == b.hi or _touch(a, b)
    either = disj(a.guard, b.guard)
    if a.hi == b.hi and a.lo == b.lo:
        return replace(a, guard=either), True
    lo, hi = _lower_start(a, b, length), _higher_end(a, b, length)
    if TRUE in (a.guard, b.guard) and _touch(
        a, b, given=either if either != TRUE else conj(a.guard, b.guard)
    ):
        return Run(lo, hi), True
    if a.hi == b.hi:
        return Run(lo, a.hi, either), True
    return Run(lo, hi), a.lo == b.lo


def _lower_start(a: Run, b: Run, length: Expr) -> Expr | None:
    x, y = a.guarded_lo(length), b.guarded_lo(length)
    if x is None or y is None:
        return None
    if b.guard == TRUE:
        a, b, x, y = b, a, y, x
    least = smaller(x, b.lo) if b.lo is not None else ZERO
    if a.guard == TRUE and not (isinstance(least, Call) and least.function == "min"):
        return where(b.guard, least, x)
    return smaller(x, y)


def _higher_end(a: Run, b: Run, length: Expr) -> Expr | None:
    x, y = a.guarded_hi(length), b.guarded_hi(length)
    if x is None or y is None:
        return None
    if b.guard == TRUE:
        a, b, x, y = b, a, y, x
    most = larger(x, b.hi) if b.hi is not None else length
    if a.guard == TRUE and not (isinstance(most, Call) and most.function == "max"):
        return where(b.guard, most, x)
    return larger(x, y)


def _touch(a: Run, b: Run, given: Expr = TRUE) -> bool:
    return all(x.hi is None or at_least(x.hi, y.lo or ZERO, given) for x, y in ((a, b), (b, a)))


def largest(a: Run, b: Run, length: Expr) -> Run:
    """Returns a run inside the union: the union itself where it is one run, else the longer of the two.

    Which is longer is found at run time, unless that would take a page of code.
    """
    joined, is_union = hull(a, b, length)
    if is_union:
        return joined
    if _cost(a) + _cost(b) > 60:
        return b if a.guard != TRUE == b.guard else a
    is_longer = relate(">", _count(b, length), _count(a, length))
    takes_b = conj(b.guard, disj(nnf(negate(a.guard)), is_longer))
    lo = where(takes_b, b.lo or ZERO, a.lo or ZERO) if a.lo != b.lo else a.lo
    hi = where(takes_b, b.hi or length, a.hi or length) if a.hi != b.hi else a.hi
    return Run(lo, hi, disj(a.guard, b.guard))


def _count(run: Run, length: Expr) -> Expr:
    return sub(run.hi or length, run.lo or ZERO)


def _cost(run: Run) -> int:
    return sum(1 for part in (run.lo, run.hi, run.guard) if part is not None for _ in walk(part))


# --- masks


Var: TypeAlias = Literal["q_idx", "kv_idx"]


@dataclass(frozen=True, slots=True)
class Solution:
    """Runs of positions that some element of the tile may keep, and that all keep; exact: the tile test adds
    nothing to `may`."""

    may: Run
    must: Run
    exact: bool = True


def conjunction(a: Solution, b: Solution) -> Solution:
    """Returns the solution of `and`."""
    return Solution(intersect(a.may, b.may), intersect(a.must, b.must), a.exact and b.exact)


def disjunction(a: Solution, b: Solution, var: Var) -> Solution:
    """Returns the solution of `or`; its runs may be too long (`may`) or too short (`must`), never the other
    way.
    """
    length = TILE[var][2]
    may, is_union = hull(a.may, b.may, length)
    has_all = any(x.exact and x.may.is_all for x in (a, b))
    exact = has_all or (is_union and a.exact and b.exact)
    return Solution(may, largest(a.must, b.must, length), exact)


def leave_unsolved(mask: Expr) -> Solution:
    """Says that all positions may be kept, unless the mask is false for the whole tile, and none must be."""
    may, _ = classify(mask)
    return Solution(ALL, NONE, exact=may == TRUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Half-open ranges of an index for one tile of the other; scalar expressions, None where unbounded.

    A kernel clamps them: [max(lo, 0), min(hi, length)). Positions outside may are kept by no element of the
    tile, those inside must by all; either may be empty (lo >= hi). `tile_may`, where present, decides for a
    tile of both indices within the hull whether it can be skipped after all.

    full, never: the mask keeps everything, nothing. any_full: a tile can be full; if none can, one partial
    loop does all. left_partial: a partial tile can stand in front of the full ones.
    """

    may_lo: Expr | None
    may_hi: Expr | None
    must_lo: Expr | None
    must_hi: Expr | None
    tile_may: Expr | None
    full: bool
    never: bool
    left_partial: bool
    any_full: bool


@memo
def solve(mask: Expr, var: Var = "kv_idx", *, tile: int = 1) -> Ranges:
    """Returns the ranges of `var` that a mask leaves to a tile of the other index.

    With var="kv_idx" the ranges use q_lo and q_hi (forward), with "q_idx" kv_lo and kv_hi (backward); both
    ends are inclusive and obey `facts`. `tile` is the number of positions of `var` in a tile: runs that are
    always shorter hold no full tile.
    """
    normal = nnf(mask)
    conjuncts = normal.operands if isinstance(normal, And) else (normal,)
    solutions = [_solve(conjunct, var) for conjunct in conjuncts]
    total = reduce(conjunction, solutions)
    open_ = (c for c, solution in zip(conjuncts, solutions, strict=True) if not solution.exact)
    tile_may = conj(*(classify(_without_fine(c, var, tile))[0] for c in open_))

    length = TILE[var][2]
    may, must = _trim_to_sequence(total.may, length), _trim_to_sequence(total.must, length)
    never = may.is_empty
    if never:
        may, must, tile_may = NONE, NONE, TRUE
    any_full = not must.is_shorter_than(max(tile, 1))
    may_lo, may_hi = may.lo, may.guarded_hi(length)
    must_lo, must_hi = (must.lo, must.guarded_hi(length)) if any_full else (ZERO, ZERO)
    return Ranges(
        may_lo=may_lo,
        may_hi=may_hi,
        must_lo=must_lo,
        must_hi=must_hi,
        tile_may=None if tile_may == TRUE else tile_may,
        full=must.is_all,
        never=never,
        left_partial=not never and not (any_full and may_lo is None and must_lo is None),
        any_full=any_full,
    )


def _without_fine(mask: Expr, var: Var, tile: int) -> Expr:
    """Returns the mask with remainders made unknown that take all their values within every tile: testing
    them skips nothing.
    """
    fine: dict[Expr, Expr] = {
        node: Ref("any", "int", ("q", "kv"))
        for node in walk(mask)
        if isinstance(node, Binary)
        and node.op == "%"
        and var in uses(node.left)
        and 0 < (number(node.right) or 0) <= tile
    }
    return substitute(mask, fine)


def _trim_to_sequence(run: Run, length: Expr) -> Run:
    lo = None if run.lo is None or at_least(ZERO, run.lo) else run.lo
    hi = None if run.hi is None or at_least(run.hi, length) else run.hi
    return Run(lo, hi, run.guard)


def _solve(mask: Expr, var: Var) -> Solution:
    match mask:
        case And(operands=operands):
            return reduce(conjunction, (_solve(operand, var) for operand in operands))
        case Or(operands=operands):
            return reduce(lambda a, b: disjunction(a, b, var), (_solve(operand, var) for operand in operands))
        case _ if var not in uses(mask):
            may, must = classify(mask)
            return Solution(Run(guard=may), Run(guard=must))
        case Compare(op=op, left=left, right=right) if "float" in (left.type, right.type):
            return _solve_float(op, left, right, var)
        case Compare(op=op, left=left, right=right):
            return _solve_sides(op, left, right, var)
        case _:
            return leave_unsolved(mask)


def _solve_sides(op: CompareOp, left: Expr, right: Expr, var: Var) -> Solution:
    if strays(left, right):
        return leave_unsolved(compare(op, left, right))
    return _solve_compare(op, affine(left) - affine(right), var)


def _solve_compare(op: CompareOp, d: Affine, var: Var) -> Solution:
    """Solves d <op> 0 through d <= 0 alone."""
    match op:
        case "<=":
            return _at_most_zero(d, var)
        case "<":
            return _at_most_zero(d + 1, var)
        case ">=":
            return _at_most_zero(-d, var)
        case ">":
            return _at_most_zero(-d + 1, var)
        case "==":
            return searched_once(conjunction(_at_most_zero(d, var), _at_most_zero(-d, var)))
        case "!=":
            either = disjunction(_at_most_zero(d + 1, var), _at_most_zero(-d + 1, var), var)
            # The hull leaves out one position at most, which no tile test would notice either.
            return Solution(either.may, either.must)


def _at_most_zero(d: Affine, var: Var) -> Solution:
    d = within_64_bits(d, besides=var)
    found = [(atom, c) for atom, c in d.terms if var in uses(atom)]
    if not found:
        is_next = d.const == 1 and len(far_terms(d)) > 1  # a < b, where b - 1 may leave 64 bits
        may, must = classify(compare("<", (d - 1).expr, ZERO) if is_next else compare("<=", d.expr, ZERO))
        return Solution(Run(guard=may), Run(guard=must))
    if len(found) > 1:
        return leave_unsolved(compare("<=", d.expr, ZERO))
    ((atom, c),) = found
    rest = d - affine(atom) * c
    if isinstance(atom, Index):
        return _half_line(c, bounds_of_sum(rest))
    if c > 0:  # atom <= floor(-rest / c)
        return _solve_atom("<=", atom, affine(floordiv((-rest).expr, Const(c))), var)
    return _solve_atom(">=", atom, affine(floordiv((rest - c - 1).expr, Const(-c))), var)


def _half_line(c: int, rest: Interval) -> Solution:
    if c > 0:

        def last(bound: Expr | None) -> Expr | None:
            return bound and (affine(floordiv((-affine(bound)).expr, Const(c))) + 1).expr

        may, must = Run(hi=last(rest.lo)), Run(hi=last(rest.hi))
    else:

        def first(bound: Expr | None) -> Expr | None:
            return bound and affine(floordiv((affine(bound) - c - 1).expr, Const(-c))).expr

        may, must = Run(lo=first(rest.lo)), Run(lo=first(rest.hi))
    return Solution(may, NONE if rest.hi is None else must)


def _solve_atom(op: Literal["<=", ">="], atom: Expr, x: Affine, var: Var) -> Solution:
    match atom:
        case Binary(op="//", left=left, right=Const(value=int(size))) if size > 0:
            return _solve_quotient(op, affine(left), size, range_of(atom), x, var)
        case Call(function="abs", args=(inner,)):
            y = affine(inner)
            if op == "<=":
                return conjunction(_at_most_zero(y - x, var), _at_most_zero(-y - x, var))
            return disjunction(_at_most_zero(x - y, var), _at_most_zero(x + y, var), var)
        case Call(function="min" | "max" as function, args=(left, right)):
            a, b = (_solve_sides(op, operand, x.expr, var) for operand in (left, right))
            return disjunction(a, b, var) if (function == "min") == (op == "<=") else conjunction(a, b)
        case Call(function="where", args=(condition, left, right)):
            then, other = (_solve_sides(op, branch, x.expr, var) for branch in (left, right))
            takes = _solve(nnf(condition), var), _solve(nnf(negate(condition)), var)
            return disjunction(conjunction(takes[0], then), conjunction(takes[1], other), var)
        case Load(is_sorted=True):
            if range_of(x.expr).is_within(I64):
                return solve_sorted(op, atom, x.expr, var)
            # x is one off a number that may be the last of its type.
            if op == "<=":
                return solve_sorted("<", atom, (x + 1).expr, var)
            return solve_sorted(">", atom, (x - 1).expr, var)
        case _:
            return leave_unsolved(compare(op, atom, x.expr))


def _solve_quotient(
    op: Literal["<=", ">="], left: Affine, size: int, quotients: Range, x: Affine, var: Var
) -> Solution:
    """Solves left // size <op> x: left <= x * size + size - 1, or left >= x * size.

    Where that product may leave 64 bits though x does not, x is first brought to where it decides alike. Of
    `quotients`, all that left // size can be, the ends have products that left can be; beyond them x keeps
    everything or nothing.
    """

    def below(limit: Affine) -> Affine:
        return left - limit if op == "<=" else limit - left

    bound = x * size + (size - 1 if op == "<=" else 0)
    d = within_64_bits(below(bound), besides=var)
    if range_of_sum(d).is_within(I64) or range_of_sum(bound).is_within(I64):
        return _at_most_zero(d, var)
    if quotients.is_within(NEAR):
        near = _clamp(x, quotients.lo - 1, quotients.hi + 1)
        return _at_most_zero(below(near * size + (size - 1 if op == "<=" else 0)), var)
    first, last = (quotients.lo, quotients.hi) if op == "<=" else (quotients.hi, quotients.lo)
    inside = below(
        (_clamp(x, first, last - 1) + 1) * size - 1 if op == "<=" else _clamp(x, last + 1, first) * size
    )
    some, every = (_solve_sides(MIRRORED[op], x.expr, Const(end), var) for end in (first, last))
    return conjunction(some, disjunction(every, _at_most_zero(inside, var), var))


def _clamp(x: Affine, least: int, most: int) -> Affine:
    return affine(maximum(minimum(x.expr, Const(most)), Const(least)))


def _solve_float(op: CompareOp, left: Expr, right: Expr, var: Var) -> Solution:
    if op == "==":
        both = conjunction(_solve_float("<=", left, right, var), _solve_float(">=", left, right, var))
        return searched_once(both)
    if op == "!=":
        return disjunction(_solve_float("<", left, right, var), _solve_float(">", left, right, var), var)
    if var in uses(right):
        left, right, op = right, left, MIRRORED[op]
    if isinstance(left, Load) and left.is_sorted and var not in uses(right):
        return solve_sorted(op, left, right, var)
    return leave_unsolved(compare(op, left, right))


def solve_sorted(op: CompareOp, load: Load, x: Expr, var: Var) -> Solution:
    """Solves T[var + offset] <op> x for ascending T and x free of var: a binary search for the bounds of x.

    Positions that fall outside T read 0. They are never in `must`; `may` is widened to them if 0 <op> x may
    hold. A search for NaN ends at 0, in front of which there is nothing, and behind which nothing must be.
    """
    *prefix, last = load.indices
    size, length = load.extents[-1], TILE[var][2]
    offset = affine(last) - affine(Index(var))
    may_be_nan = x.type == "float" and not is_finite(x)
    if not all(map(is_scalar, (*prefix, offset.expr))) or (may_be_nan and not is_scalar(x)):
        return leave_unsolved(compare(op, load, x))

    rows = tuple(map(normalize, prefix))
    is_row = conj(
        *(
            conj(relate(">=", row, ZERO), relate("<", row, extent))
            for row, extent in zip(rows, load.extents[:-1], strict=True)
            if not lies_inside(row, extent)
        )
    )

    def first(side: Literal["lower", "upper"], value: Expr | None) -> Expr | None:
        """Returns the first position with T >= value (lower) or T > value (upper). Of a row outside of T,
        which reads 0, nothing is looked at.
        """
        if value is None:
            return None
        search = Search(side, load.tensor, rows, load.extents, value)
        if is_row == TRUE:
            return (affine(search) - offset).expr
        passes_zeros = compare("<" if side == "lower" else "<=", _zero(load), value)
        none_outside = replace(search, limit=where(is_row, size, ZERO))
        found = where(is_row, none_outside, where(passes_zeros, size, ZERO))
        return (affine(found) - offset).expr

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
    is_number = compare("==", limits.hi, limits.hi) if may_be_nan and limits.hi is not None else TRUE
    must = Run(first(side, limits.hi), None if ends_inside else (affine(size) - offset).expr, is_number)
    if may.lo is not None and limits.lo is not None and not starts_inside:
        reads_zero = conj(relate("<", offset.expr, ZERO), compare(op, _zero(load), limits.lo))
        may = Run(lo=where(reads_zero, ZERO, may.lo))
    return Solution(may, must if limits.hi is not None else NONE)


def searched_once(equality: Solution) -> Solution:
    """Returns an equality with a sorted load, its `must` in terms of the searches of `may`.

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
    found = [] if bound is None else [node for node in walk(bound) if isinstance(node, Search)]
    return found[0] if len(found) == 1 and found[0].side == side else None


def _zero(load: Load) -> Const:
    return Const(0 if load.type == "int" else 0.0)
