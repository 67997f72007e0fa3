"""What values an expression can have: which integers, as plain numbers, and between which scalars it lies
over a tile.

`range_of` decides where 32 bits suffice. Sizes, and so positions, stay below 2^30; a loaded integer is
anything that its type holds; a parameter is itself. Sums of positions are bounded together and not term
by term, since `kv_idx - q_pos` is a distance between two of N keys and M queries, however large N is.
Sound for every element of a tile, those past the end of a sequence included.

`classify` says of a mask over a tile, the box q_lo..q_hi x kv_lo..kv_hi (compare Halide's `Bounds.h`), by
two scalar conditions: `may` is true if it may keep some element, `must` only if it keeps all. Not `may`:
skip the tile; `must`: no mask code; else partial. Every integer comparison is a sum of atoms compared
with 0 (`affine`), hence exact over the box when the atoms are indices; other atoms have intervals of
their own. Sound by construction: each rule gives an interval that holds the value of every element, and
what has no rule has no bounds. Float bounds use the operations of the float expression itself, which
round monotonically; products fused with sums may differ from them in the last bit. Where an element may be
no number, so are they.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import TypeAlias

from attnc.expr.affine import TILE, Affine, affine, at_least, larger, normalize, relate, smaller
from attnc.expr.construct import (
    MIRRORED,
    NEGATED,
    ZERO,
    add,
    compare,
    conj,
    disj,
    floordiv,
    maximum,
    minimum,
    mod,
    mul,
    neg,
    negate,
    number,
    sub,
    where,
)
from attnc.expr.finite import is_finite
from attnc.expr.nodes import (
    FALSE,
    TRUE,
    And,
    Binary,
    Call,
    Compare,
    CompareOp,
    Const,
    Dim,
    Dot,
    Expr,
    Index,
    Load,
    Neg,
    Not,
    Or,
    Ref,
    Search,
    Type,
    uses,
    walk,
)
from attnc.expr.simplify import nnf

# --- integers


#: The largest tile, and so how far the elements of one may lie past the end.
_TILE = 1024
#: The most queries, keys or anything else that a tensor has along an axis; positions of a last tile, which
#: may lie past the end, are below 2^30.
SIZE = (1 << 30) - _TILE
POSITION = (1 << 30) - 1
_POSITIONS = {
    "q_idx": "q_idx", "q_lo": "q_idx", "q_hi": "q_idx",
    "kv_idx": "kv_idx", "kv_lo": "kv_idx", "kv_hi": "kv_idx",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Range:
    """Integers from lo to hi, both included."""

    lo: int
    hi: int

    def is_within(self, other: Range) -> bool:
        return other.lo <= self.lo and self.hi <= other.hi


I32 = Range(-(1 << 31), (1 << 31) - 1)
I64 = Range(-(1 << 63), (1 << 63) - 1)
BYTE = Range(0, 255)
NEAR = Range(-POSITION, POSITION)
#: What leaves room in 64 bits for what bounds add, and for a change of sign; a term beyond the second leaves
#: none for others like it.
_ROOM, _TERM = Range(-(1 << 62), 1 << 62), Range(-(1 << 60), 1 << 60)


@lru_cache(maxsize=1 << 14)
def range_of(expr: Expr) -> Range:
    """Returns the integers that an int expression can be, if nothing leaves 64 bits on the way."""
    match expr:
        case Const(value=value):
            return Range(int(value), int(value))
        case Index(name="q_pos"):
            return Range(-SIZE, POSITION)
        case Index():
            return Range(0, POSITION)
        case Dim(name="BLOCK_M" | "BLOCK_N"):
            return Range(1, _TILE)
        case Dim() | Search():
            return Range(0, SIZE)
        case Load(is_byte=True):
            return BYTE
        case Load(within=within, wide=wide) | Ref(within=within, wide=wide):
            return Range(*within) if within is not None else I64 if wide else I32
        case Neg(operand=operand):
            a = range_of(operand)
            return Range(-a.hi, -a.lo)
        case Binary(op="+" | "-" as op, left=left, right=right):
            a, b = range_of(left), range_of(right)
            found = Range(a.lo + b.lo, a.hi + b.hi) if op == "+" else Range(a.lo - b.hi, a.hi - b.lo)
            if found.is_within(NEAR):
                return found
            together = range_of_sum(affine(expr))
            return Range(max(found.lo, together.lo), min(found.hi, together.hi))
        case Binary(op="*", left=Binary(op="//", left=whole, right=size), right=factor) if size == factor:
            return _range_of_rounded(range_of(whole), range_of(size))
        case Binary(op="*", left=left, right=right):
            return _hull(x * y for x in _ends(range_of(left)) for y in _ends(range_of(right)))
        case Binary(op="//", left=left, right=right):
            by = range_of(right)
            divisors = {d for d in (by.lo, by.hi, -1, 1) if d and by.lo <= d <= by.hi}
            quotients = [x // d for x in _ends(range_of(left)) for d in divisors]
            return _hull((*quotients, *([0] if by.lo <= 0 <= by.hi else [])))
        case Binary(op="%", left=left, right=right):
            a, by = range_of(left), range_of(right)
            if a.lo >= 0 and a.hi < by.lo:
                return a
            return Range(min(by.lo + 1, 0), max(by.hi - 1, 0))
        case Call(function="abs", args=(operand,)):
            a = range_of(operand)
            return Range(0 if a.lo <= 0 <= a.hi else min(abs(a.lo), abs(a.hi)), max(abs(a.lo), abs(a.hi)))
        case Call(function="min", args=(left, right)):
            a, b = range_of(left), range_of(right)
            return Range(min(a.lo, b.lo), min(a.hi, b.hi))
        case Call(function="max", args=(left, right)):
            a, b = range_of(left), range_of(right)
            return Range(max(a.lo, b.lo), max(a.hi, b.hi))
        case Call(function="where", args=(_, left, right)):
            a, b = range_of(left), range_of(right)
            return Range(min(a.lo, b.lo), max(a.hi, b.hi))
        case _:
            return I64


def range_of_sum(total: Affine, past: int = _TILE - 1) -> Range:
    """Returns the integers that a sum can be, whose positions lie among the M queries and the N keys, or up
    to `past` behind them: 0 for those that exist.
    """
    return Range(-_largest_value(-total, past), _largest_value(total, past))


def _largest_value(total: Affine, past: int) -> int:
    """Returns the largest value of a sum: positions give way to the ends of their ranges, which sizes may
    cancel, the rest to its own ends.
    """
    for name, position in _POSITIONS.items():
        index = Index(name)
        c = dict(total.terms).get(index, 0)
        if c:
            end = affine(TILE[position][2]) + (past - 1) if c > 0 else Affine((), 0)
            total = total + (end - affine(index)) * c
    for atom, c in total.terms:
        if isinstance(atom, Search) and c > 0:
            total = total + (affine(atom.extents[-1]) - affine(atom)) * c
    ends = ((c, range_of(atom)) for atom, c in total.terms)
    return total.const + sum(c * (found.hi if c > 0 else found.lo) for c, found in ends)


def within_64_bits(total: Affine, besides: str = "") -> Affine:
    """Returns a sum that is below, at or above 0 wherever this one is, and whose terms can change sides of a
    comparison, with one more or less, without leaving 64 bits.

    One integer of its type's full range prevents that: 2^63 - 1, "no limit". Where it is farther than all
    other terms reach, it alone decides, so it counts as just as far. besides: an index that it may not depend
    on, since it is solved for.
    """
    if range_of_sum(total).is_within(_ROOM):
        return total
    far = far_terms(total)
    if len(far) != 1:
        return total
    ((atom, c),) = far
    if besides in uses(atom) or bounds_of_atom(atom) == UNKNOWN:
        return total
    rest = range_of_sum(total - affine(atom) * c)
    if not rest.is_within(_ROOM):
        return total
    most = max(-rest.lo, rest.hi) // abs(c) + 1
    return total + (affine(maximum(minimum(atom, Const(most)), Const(-most))) - affine(atom)) * c


def far_terms(total: Affine) -> list[tuple[Expr, int]]:
    """Returns the terms of a sum beside which 64 bits have no room for others like them."""
    return [(atom, c) for atom, c in total.terms if not range_of_sum(affine(atom) * c).is_within(_TERM)]


def strays(left: Expr, right: Expr) -> bool:
    """Returns whether terms may not change sides of a comparison: both sides are far integers of 64 bits, and
    one is a sum, `kv_idx + a[b] // 2 <= c[b]`. Sums that may leave 64 bits as they stand are not defined, and
    so are none.
    """
    sides = affine(left), affine(right)
    return (
        all(map(far_terms, sides))
        and any(len(side.terms) > 1 or side.const for side in sides)
        and range_of(left).is_within(I64)
        and range_of(right).is_within(I64)
        and not range_of_sum(sides[0] - sides[1]).is_within(_ROOM)
    )


def _ends(found: Range) -> tuple[int, ...]:
    return (found.lo, found.hi)


def _hull(values: Iterable[int]) -> Range:
    known = tuple(values)
    return Range(min(known), max(known))


def _range_of_rounded(whole: Range, size: Range) -> Range:
    """Returns the range of x // size * size, which is x or up to size - 1 less; 0 if the size is 0."""
    if size.lo == size.hi > 0:
        return Range(whole.lo // size.lo * size.lo, whole.hi)
    if size.lo <= 0:
        return Range(min(whole.lo + size.lo - 1, whole.lo - size.hi, 0), max(whole.hi - size.lo, whole.hi, 0))
    return Range(max(whole.lo - size.hi + 1, 0) if whole.lo >= 0 else whole.lo - size.hi + 1, whole.hi)


# --- over a tile


Join: TypeAlias = Callable[[Expr, Expr], Expr]


@dataclass(frozen=True, slots=True)
class Interval:
    """Scalar bounds, inclusive, that hold for every element of a tile; None: no bound known."""

    lo: Expr | None
    hi: Expr | None


UNKNOWN = Interval(None, None)


def is_scalar(expr: Expr) -> bool:
    """Returns whether the value is the same for every element of a tile."""
    return not any(
        (isinstance(node, Index) and node.name in ("q_idx", "q_pos", "kv_idx"))
        or isinstance(node, Dot)
        or (isinstance(node, Ref) and node.axes)
        for node in walk(expr)
    )


def classify(mask: Expr) -> tuple[Expr, Expr]:
    """Returns (may, must) of a mask over the tile (q_lo, q_hi, kv_lo, kv_hi), which obeys `facts`. Neither
    uses q_idx or kv_idx.
    """
    return _classify(nnf(mask))


def _classify(mask: Expr) -> tuple[Expr, Expr]:
    match mask:
        case And(operands=operands):
            pairs = [_classify(operand) for operand in operands]
            return conj(*(may for may, _ in pairs)), conj(*(must for _, must in pairs))
        case Or(operands=operands):
            pairs = [_classify(operand) for operand in operands]
            return disj(*(may for may, _ in pairs)), disj(*(must for _, must in pairs))
        case Compare(op="!=", left=left, right=right):
            return _classify_not(compare("==", left, right))
        case Not(operand=Compare() as operand):
            return _classify_not(operand)
        case Compare(op=op, left=left, right=right) if "float" in (left.type, right.type):
            return _classify_float(op, bounds(left), bounds(right))
        case Compare(left=left, right=right) if strays(left, right):
            return (mask, mask) if is_scalar(mask) else (TRUE, FALSE)
        case Compare(op="==", left=left, right=right):
            return _classify_equal(within_64_bits(affine(left) - affine(right)))
        case Compare(op=op, left=left, right=right):
            interval = bounds_of_sum(within_64_bits(affine(left) - affine(right)))
            low, high = (interval.lo, interval.hi) if op in ("<", "<=") else (interval.hi, interval.lo)
            return _relate(op, low, ZERO, unknown=TRUE), _relate(op, high, ZERO, unknown=FALSE)
        case _ if is_scalar(mask):
            return normalize(mask), normalize(mask)
        case _:
            return TRUE, FALSE


def _classify_not(mask: Expr) -> tuple[Expr, Expr]:
    may, must = _classify(mask)
    return nnf(Not(must)), nnf(Not(may))


def _relate(op: CompareOp, left: Expr | None, right: Expr | None, *, unknown: Expr) -> Expr:
    if left is None or right is None:
        return unknown
    return relate(op, left, right) if left.type == right.type == "int" else compare(op, left, right)


def _classify_equal(difference: Affine) -> tuple[Expr, Expr]:
    interval = bounds_of_sum(difference)
    lo, hi = interval.lo, interval.hi
    if lo is not None and lo == hi:
        same = relate("==", lo, ZERO)
        return same, same
    if (exact := _classify_remainder(difference)) is not None:
        return exact
    may = conj(_relate("<=", lo, ZERO, unknown=TRUE), _relate(">=", hi, ZERO, unknown=TRUE))
    must = conj(_relate(">=", lo, ZERO, unknown=FALSE), _relate("<=", hi, ZERO, unknown=FALSE))
    return may, must


def _classify_remainder(difference: Affine) -> tuple[Expr, Expr] | None:
    """Returns (may, must) of x % s == r with scalar r in 0..s-1: whether the last number up to x.hi that
    leaves r is within x.lo .. x.hi.
    """
    match [(atom, c) for atom, c in difference.terms if not is_scalar(atom)]:
        case [(Binary(op="%", left=left, right=Const(value=int(size))) as atom, 1 | -1 as c)] if size > 1:
            x = bounds(left)
            if x.lo is None or x.hi is None:
                return None
            r = affine(atom) - difference * c
            valid = conj(relate(">=", r.expr, ZERO), relate("<", r.expr, Const(size)))
            steps = affine(floordiv((affine(x.hi) - r).expr, Const(size)))
            may = relate(">=", (steps * size + r).expr, x.lo)
            return conj(valid, may), conj(valid, may, relate("==", x.lo, x.hi))
        case _:
            return None


def _classify_float(op: CompareOp, left: Interval, right: Interval) -> tuple[Expr, Expr]:
    if op in (">", ">="):
        return _classify_float(MIRRORED[op], right, left)
    if op == "==":
        pairs = [_classify_float("<=", left, right), _classify_float("<=", right, left)]
        return conj(*(may for may, _ in pairs)), conj(*(must for _, must in pairs))
    must = _relate(op, left.hi, right.lo, unknown=FALSE)
    if left.lo is None or right.hi is None or must == TRUE:
        return TRUE, must
    if (left.lo, right.lo) == (left.hi, right.hi) or (is_finite(left.lo) and is_finite(right.hi)):
        return _relate(op, left.lo, right.hi, unknown=TRUE), must
    # At an end of the tile 0 * inf may be NaN, and elsewhere nothing is: so ask for what no element may be.
    return negate(_relate(NEGATED[op], left.lo, right.hi, unknown=FALSE)), must


def bounds_of_sum(total: Affine) -> Interval:
    """Bounds a sum; exactly if the bounds of every atom are, since each atom occurs once."""
    low, high = Affine((), total.const), Affine((), total.const)
    has_low = has_high = True
    for atom, c in total.terms:
        interval = bounds_of_atom(atom)
        lo, hi = (interval.lo, interval.hi) if c > 0 else (interval.hi, interval.lo)
        has_low, has_high = has_low and lo is not None, has_high and hi is not None
        low = low + affine(lo or ZERO) * c
        high = high + affine(hi or ZERO) * c
    return Interval(low.expr if has_low else None, high.expr if has_high else None)


def bounds(expr: Expr) -> Interval:
    """Returns bounds of an int or float expression over the tile."""
    if expr.type == "int":
        return bounds_of_sum(affine(expr))
    return bounds_of_atom(expr)


def bounds_of_atom(expr: Expr) -> Interval:
    """Returns bounds of what is not a sum of several atoms, by its own operation."""
    if is_scalar(expr):
        return Interval(normalize(expr), normalize(expr))
    match expr:
        case Index(name="q_idx" | "kv_idx" as name):
            low, high, _ = TILE[name]
            return Interval(low, high)
        case Load(is_sorted=True):
            return _bounds_of_sorted(expr)
        case Neg(operand=operand):
            a = bounds(operand)
            return Interval(a.hi and neg(a.hi), a.lo and neg(a.lo))
        case Binary(op="+", left=left, right=right):
            a, b = bounds(left), bounds(right)
            return _or_nan(Interval(_both(add, a.lo, b.lo), _both(add, a.hi, b.hi)), _infinite_ends(a, b))
        case Binary(op="-", left=left, right=right):
            a, b = bounds(left), bounds(right)
            return _or_nan(Interval(_both(sub, a.lo, b.hi), _both(sub, a.hi, b.lo)), _infinite_ends(a, b))
        case Binary(op="*", left=left, right=right):
            return _bounds_of_product(bounds(left), bounds(right))
        case Binary(op="//", left=left, right=right) if _is_positive(right):
            a = bounds(left)
            return Interval(
                a.lo and normalize(floordiv(a.lo, right)), a.hi and normalize(floordiv(a.hi, right))
            )
        case Binary(op="%", left=left, right=right) if _is_positive(right):
            return _bounds_of_remainder(bounds(left), right)
        case Call(function="abs", args=(operand,)):
            a = bounds(operand)
            if a.lo is None or a.hi is None:  # a float may be NaN, which is not above 0
                return Interval(ZERO, None) if expr.type == "int" else UNKNOWN
            nearest = _larger(a.lo, neg(a.hi))
            return Interval(
                _larger(nearest, Const(0 if expr.type == "int" else 0.0)), _larger(neg(a.lo), a.hi)
            )
        case Call(function="min", args=(left, right)):
            a, b = bounds(left), bounds(right)
            return Interval(_both(_smaller, a.lo, b.lo), _any(_smaller, a.hi, b.hi, expr.type))
        case Call(function="max", args=(left, right)):
            a, b = bounds(left), bounds(right)
            return Interval(_any(_larger, a.lo, b.lo, expr.type), _both(_larger, a.hi, b.hi))
        case Call(function="where", args=(condition, left, right)):
            may, must = classify(condition)
            a, b = bounds(left), bounds(right)
            return Interval(
                _bound_where(may, must, _smaller, a.lo, b.lo), _bound_where(may, must, _larger, a.hi, b.hi)
            )
        case _:
            return UNKNOWN


def _bounds_of_sorted(load: Load) -> Interval:
    """Bounds T[i], ascending in its last index i: it lies between the elements at the ends of i's range.

    An index outside the tensor reads 0. So an end that may lie outside is read both as it is, which gives
    that 0, and clipped.
    """
    *prefix, last = load.indices
    index = bounds(last)
    if index.lo is None or index.hi is None or not all(map(is_scalar, prefix)):
        return UNKNOWN

    def at(position: Expr) -> Expr:
        return normalize(replace(load, indices=(*prefix, position)))

    end = (affine(load.extents[-1]) - 1).expr
    lows, highs = [at(index.lo)], [at(index.hi)]
    if not at_least(index.lo, ZERO):
        lows.append(at(larger(index.lo, ZERO)))
        highs.insert(0, at(index.lo))
    if not at_least(end, index.hi):
        highs.append(at(smaller(index.hi, end)))
        lows.append(at(index.hi))
    return Interval(reduce(_smaller, lows), reduce(_larger, highs))


def _bounds_of_product(a: Interval, b: Interval) -> Interval:
    if a.lo is None or a.hi is None or b.lo is None or b.hi is None:
        return UNKNOWN
    corners = [normalize(mul(x, y)) for x in dict.fromkeys((a.lo, a.hi)) for y in dict.fromkeys((b.lo, b.hi))]
    infinite = [*_infinite_beside(a, b), *_infinite_beside(b, a)] if corners[0].type == "float" else []
    return _or_nan(Interval(reduce(_smaller, corners), reduce(_larger, corners)), infinite)


def _infinite_beside(factor: Interval, other: Interval) -> list[Expr]:
    """Returns the ends of a factor which, if infinite, make no number of a 0 between the ends of the other; a
    0 at an end shows in the product of that end.
    """
    if factor.lo is None or other.lo is None or other.hi is None or other.lo == other.hi:
        return []
    if at_least(other.lo, ZERO) or at_least(ZERO, other.hi):
        return []
    return [end for end in dict.fromkeys((factor.lo, factor.hi)) if end is not None and not is_finite(end)]


def _infinite_ends(a: Interval, b: Interval) -> list[Expr]:
    """Returns the ends of two terms which, if infinite, may make no number of a sum between its bounds: those
    of two that vary.
    """
    if a.lo == a.hi or b.lo == b.hi:
        return []
    return [end for end in (a.lo, a.hi) if end is not None and end.type == "float" and not is_finite(end)]


def _or_nan(found: Interval, infinite: Sequence[Expr]) -> Interval:
    """Returns bounds that are no numbers where one of these is infinite: an element may be none then, which
    is below and above nothing.
    """
    for end in infinite:
        nothing = Binary("*", Const(0.0), end)
        found = Interval(_both(add, found.lo, nothing), _both(add, found.hi, nothing))
    return found


def _bounds_of_remainder(x: Interval, size: Expr) -> Interval:
    most = larger((affine(size) - 1).expr, ZERO)
    if x.lo is None or x.hi is None:
        return Interval(ZERO, most)
    same_quotient = relate("==", floordiv(x.lo, size), floordiv(x.hi, size))
    low, high = normalize(mod(x.lo, size)), normalize(mod(x.hi, size))
    return Interval(where(same_quotient, low, ZERO), where(same_quotient, high, most))


def _is_positive(divisor: Expr) -> bool:
    """Returns whether it is a positive constant, or a size: that may be 0, and then // and % by it are 0,
    which their bounds allow.
    """
    return divisor.type == "int" and ((number(divisor) or 0) > 0 or isinstance(divisor, Dim))


def _bound_where(may: Expr, must: Expr, worst: Join, then: Expr | None, other: Expr | None) -> Expr | None:
    if then is None or other is None:
        return None
    mixed = other if may == must else where(may, worst(then, other), other)
    return where(must, then, mixed)


def _smaller(a: Expr, b: Expr) -> Expr:
    return smaller(a, b) if a.type == b.type == "int" else minimum(a, b)


def _larger(a: Expr, b: Expr) -> Expr:
    return larger(a, b) if a.type == b.type == "int" else maximum(a, b)


def _both(join: Join, a: Expr | None, b: Expr | None) -> Expr | None:
    return None if a is None or b is None else join(a, b)


def _any(join: Join, a: Expr | None, b: Expr | None, type_: Type) -> Expr | None:
    """Returns the bound of the lesser, or the larger, of two values, for which one of theirs is enough; not
    so for floats, of which the other may be NaN, and then is what is chosen.
    """
    if type_ == "float":
        return _both(join, a, b)
    return b if a is None else a if b is None else join(a, b)
