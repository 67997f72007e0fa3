"""Which integers of a kernel take 64 bits, from what they can be (`expr.ranges`): positions, lengths and
bounds of loops have 32, loaded values what their tensor has, and a result that may leave 32 bits has 64.

A comparison of positions with one loaded integer needs no more than 32 even if that integer has 64: no two
positions are 2^30 apart, so what lies beyond can count as 2^30. The value is brought there where it is
loaded, which is once for a program or a row, and not element by element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from attnc.expr.affine import affine
from attnc.expr.facts import larger, smaller
from attnc.expr.nodes import Binary, Call, Compare, Const, Expr, Load, Neg, Ref, children, rebuild, walk
from attnc.expr.ranges import I32, NEAR, SIZE, Range, range_of, range_of_sum
from attnc.expr.solve import solve


def is_wide(expr: Expr) -> bool:
    """Whether the value is held in 64 bits: it may leave 32, or is made from one that is."""
    if expr.type != "int":
        return False
    match expr:
        case Load(wide=wide) | Ref(wide=wide):
            return wide and not range_of(expr).is_within(I32)
        case Binary(op=op, left=left, right=right):
            return may_overflow(op, left, right)
        case Neg(operand=operand) | Call(function="abs", args=(operand,)):
            return is_wide(operand) or not range_of(expr).is_within(I32)
        case Call(args=args):
            return any(map(is_wide, args))
        case Const():
            return not range_of(expr).is_within(I32)
        case _:
            return False


def may_overflow(op: str, left: Expr, right: Expr) -> bool:
    """Whether an integer operation has to be carried out in 64 bits."""
    if left.type != "int" or right.type != "int" or op == "/":
        return False
    result = Binary(op, left, right)  # type: ignore[arg-type]  # an operator of a node
    return is_wide(left) or is_wide(right) or not range_of(result).is_within(I32)


def ends_of(value: Expr) -> tuple[int, int]:
    """The least and the most that it can be."""
    found = range_of(value)
    return found.lo, found.hi


def narrowed(value: Expr, length: Expr) -> Expr:
    """A bound of positions from 0 to `length`, brought into that range, in 64 bits if it has them, before it
    is kept in 32 and tiles are added to it.
    """
    if not is_wide(value) and range_of(value).is_within(NEAR):
        return value
    below = smaller(value, length)
    return below if range_of(below).lo >= 0 else larger(below, Const(0))


def saturated(mask: Expr) -> Expr:
    """The same mask, its far integers brought near where that keeps comparisons, or the bounds of loops that
    follow from them, in 32 bits.
    """
    mask = rebuild(mask, tuple(map(saturated, children(mask))))
    if isinstance(mask, Compare) and mask.left.type == mask.right.type == "int":
        return _saturated(mask)
    return mask


def _saturated(comparison: Compare) -> Expr:
    """P + c * x <op> 0, for a load x and a sum |P| <= p: any |x| > p / |c| gives what p / |c| + 1 does."""
    difference = affine(comparison.left) - affine(comparison.right)
    far = [(atom, c) for atom, c in difference.terms if not range_of(atom).is_within(NEAR)]
    if len(far) != 1 or not _is_costly(comparison):
        return comparison
    ((x, c),) = far
    near = difference - affine(x) * c
    if not isinstance(x, Load) or any(x in walk(atom) for atom, _ in near.terms):
        return comparison
    found = range_of_sum(near, past=0)
    reach = max(-found.lo, found.hi) + 1
    most = -(-max(reach, SIZE) // abs(c))
    if not Range(-most * abs(c) - reach, most * abs(c) + reach).is_within(I32):
        return comparison
    return _replaced(comparison, x, replace(x, within=(-most, most)))


def _is_costly(comparison: Compare) -> bool:
    """Whether it, or a bound that follows from it, would take 64 bits."""
    return any(is_wide(node) for expr in (comparison, *_bounds(comparison)) for node in walk(expr))


def _bounds(mask: Expr) -> Iterator[Expr]:
    for ranges in (solve(mask, var="kv_idx"), solve(mask, var="q_idx")):
        found: Iterable[Expr | None] = (ranges.may_lo, ranges.may_hi, ranges.must_lo, ranges.must_hi)
        yield from (expr for expr in found if expr is not None)


def _replaced(expr: Expr, old: Expr, new: Expr) -> Expr:
    """The expression as it is written, with another load."""
    if expr == old:
        return new
    return rebuild(expr, tuple(_replaced(child, old, new) for child in children(expr)))
