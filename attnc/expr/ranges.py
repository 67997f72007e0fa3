"""Which integers an expression can be, as an interval of plain numbers: what decides where 32 bits suffice.

Sizes, and so positions, stay below 2^30; a loaded integer is anything that its type holds; a parameter is
itself. Sums of positions are bounded together and not term by term, since `kv_idx - q_pos` is a distance
between two of N keys and M queries, however large N is (`facts`). Sound for every element of a tile, those
past the end of a sequence included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from attnc.expr.affine import Affine, affine
from attnc.expr.facts import TILE
from attnc.expr.nodes import Binary, Call, Const, Dim, Expr, Index, Load, Neg, Ref, Search

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
NEAR = Range(-POSITION, POSITION)


@lru_cache(maxsize=1 << 14)
def range_of(expr: Expr) -> Range:
    """The integers that an int expression can be, if nothing leaves 64 bits on the way."""
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
    """The integers that a sum can be, whose positions lie among the M queries and the N keys, or up to `past`
    behind them: 0 for those that exist.
    """
    return Range(-_largest_value(-total, past), _largest_value(total, past))


def _largest_value(total: Affine, past: int) -> int:
    """Positions give way to the ends of their ranges, which sizes may cancel; the rest to its own ends."""
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


def _ends(found: Range) -> tuple[int, ...]:
    return (found.lo, found.hi)


def _hull(values: Iterable[int]) -> Range:
    known = tuple(values)
    return Range(min(known), max(known))


def _range_of_rounded(whole: Range, size: Range) -> Range:
    """x // size * size, which is x or up to size - 1 less; 0 if the size is 0."""
    if size.lo <= 0:
        return Range(min(whole.lo + size.lo - 1, whole.lo - size.hi, 0), max(whole.hi - size.lo, whole.hi, 0))
    return Range(max(whole.lo - size.hi + 1, 0) if whole.lo >= 0 else whole.lo - size.hi + 1, whole.hi)
