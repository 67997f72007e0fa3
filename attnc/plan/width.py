"""Which integers of a kernel take 64 bits, from what they can be (`expr.interval`): positions, lengths and
bounds of loops have 32, loaded values what their tensor has, and a result that may leave 32 bits has 64.

A comparison of positions with one loaded integer needs no more than 32 even if that integer has 64: no two
positions are 2^30 apart, so what lies beyond can count as 2^30. The value is brought there where it is
loaded, which is once for a program or a row, and not element by element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from attnc.effort import memo
from attnc.expr.affine import affine, larger, smaller
from attnc.expr.construct import BITS, ZERO, compare, conj
from attnc.expr.interval import I32, NEAR, Range, range_of, range_of_sum
from attnc.expr.nodes import Binary, Call, Compare, Const, Expr, Load, Neg, Ref, children, rebuild, walk
from attnc.expr.simplify import substitute
from attnc.expr.solve import solve


@memo
def is_wide(expr: Expr) -> bool:
    """Returns whether the value is held in 64 bits: it may leave 32, or is made from one that is."""
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
    """Returns whether an integer operation has to be carried out in 64 bits."""
    if left.type != "int" or right.type != "int" or op == "/":
        return False
    result = Binary(op, left, right)  # type: ignore[arg-type]  # an operator of a node
    return is_wide(left) or is_wide(right) or not range_of(result).is_within(I32)


def ends_of(value: Expr) -> tuple[int, int]:
    """Returns the least and the most that it can be."""
    found = range_of(value)
    return found.lo, found.hi


def narrow_bound(value: Expr, length: Expr) -> Expr:
    """Returns a bound of positions from 0 to `length`, brought near that range, in 64 bits if it has them,
    before it is kept in 32 and tiles are added to it.
    """
    found = range_of(value)
    below = smaller(value, length) if found.hi > NEAR.hi else value
    return larger(below, Const(0)) if found.lo < NEAR.lo else below


#: Places of bits that a shift of a word may be by, where it has 32 bits and where it has 64.
_SHIFTS_OF_32, _SHIFTS_OF_64 = Range(0, BITS // 2 - 1), Range(0, BITS - 1)


def bound_places(expr: Expr) -> Expr:
    """Rewrites every `bit(word, i)` whose i may be outside 0 .. 63: it is false there, and shifts by i % 64
    elsewhere, since a shift by any other number is undefined.
    """
    expr = rebuild(expr, tuple(map(bound_places, children(expr))))
    match expr:
        case Call(function="bit", args=(word, place)) if not range_of(place).is_within(_SHIFTS_OF_64):
            is_place = (compare("<=", ZERO, place), compare("<", place, Const(BITS)))
            return conj(*is_place, replace(expr, args=(word, Binary("%", place, Const(BITS)))))
        case _:
            return expr


def shifts_wide(word: Expr, place: Expr) -> bool:
    """Returns whether a bit is taken of a word of 64 bits: it has them, or the place may be beyond 32."""
    return is_wide(word) or not range_of(place).is_within(_SHIFTS_OF_32)


def saturate_far(mask: Expr) -> Expr:
    """Rewrites a mask so that its far integers are brought near where that keeps comparisons, or the bounds
    of loops that follow from them, in 32 bits.

    An integer that one comparison wants near is near in all that allow it, so that it has one name. What a
    constant beyond all positions decides goes: `q_pos - 2147483647 <= kv_idx`.
    """
    decided: dict[Expr, Expr] = {
        node: value for node in _comparisons(mask) if (value := _decide(node)) is not None
    }
    if decided:
        mask = substitute(mask, decided)
    nodes = _comparisons(mask)
    found = {node: far for node in nodes if (far := _far(node)) is not None}
    costly = {far.load for node, far in found.items() if _is_costly(node)}
    most = {load: max(far.most for far in found.values() if far.load == load) for load in costly}
    near: dict[Expr, Expr] = {
        node: _replace(node, far.load, replace(far.load, within=(-most[far.load], most[far.load])))
        for node, far in found.items()
        if far.load in costly and far.allows(most[far.load])
    }
    return _rebuilt(mask, near)


def _comparisons(mask: Expr) -> list[Compare]:
    return [
        node
        for node in walk(mask)
        if isinstance(node, Compare) and node.left.type == node.right.type == "int"
    ]


def _decide(comparison: Compare) -> Expr | None:
    """Returns the value of a comparison with a constant beyond all positions; None if it is not the same for
    all.
    """
    op, difference = comparison.op, affine(comparison.left) - affine(comparison.right)
    if Range(difference.const, difference.const).is_within(NEAR):
        return None
    found = range_of_sum(difference)
    if op in ("==", "!="):
        return None if found.lo <= 0 <= found.hi else Const(op == "!=")
    least, most = (compare(op, Const(end), ZERO) for end in (found.lo, found.hi))
    return least if least == most else None


@dataclass(frozen=True, slots=True)
class _Far:
    """P + c * load <op> 0 for a sum |P| < reach of positions: where |load| >= reach / |c|, it is the load
    alone that decides.
    """

    load: Load
    factor: int
    reach: int

    @property
    def most(self) -> int:
        return -(-max(self.reach, NEAR.hi) // self.factor)

    def allows(self, most: int) -> bool:
        return most * self.factor >= self.reach and self.reach + most * self.factor <= I32.hi


def _far(comparison: Compare) -> _Far | None:
    difference = affine(comparison.left) - affine(comparison.right)
    far = [(atom, c) for atom, c in difference.terms if not range_of(atom).is_within(NEAR)]
    if len(far) != 1:
        return None
    ((load, c),) = far
    near = difference - affine(load) * c
    if not isinstance(load, Load) or any(load in walk(atom) for atom, _ in near.terms):
        return None
    found = range_of_sum(near, past=0)
    return _Far(load, abs(c), max(-found.lo, found.hi) + 1)


def _is_costly(comparison: Compare) -> bool:
    return any(is_wide(node) for expr in (comparison, *_bounds(comparison)) for node in walk(expr))


def _bounds(mask: Expr) -> Iterator[Expr]:
    for ranges in (solve(mask, var="kv_idx"), solve(mask, var="q_idx")):
        found: Iterable[Expr | None] = (ranges.may_lo, ranges.may_hi, ranges.must_lo, ranges.must_hi)
        yield from (expr for expr in found if expr is not None)


def _replace(expr: Expr, old: Expr, new: Expr) -> Expr:
    return _rebuilt(expr, {old: new})


def _rebuilt(expr: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    found = mapping.get(expr)
    if found is not None:
        return found
    return rebuild(expr, tuple(_rebuilt(child, mapping) for child in children(expr)))
