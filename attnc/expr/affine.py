"""Integer expressions as sum(c * x) + const: the form in which every index of a comparison occurs once.

`kv_idx - q_pos <= kv_idx` and `q_pos >= 0` have the same normal form, and a sum of distinct atoms takes its
exact bounds over a box at a corner of it. Whatever is not a sum is an atom: an index, a size, a load, a
quotient. Non-goal: identities between atoms beyond `(s * x + r) // s = x + r // s`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from attnc.effort import memo, spend
from attnc.expr.arithmetic import add, floordiv, mod, mul, sub
from attnc.expr.nodes import Binary, Call, Const, Dim, Expr, Index, Load, Neg, children
from attnc.expr.show import show
from attnc.expr.simplify import make, simplify


@dataclass(frozen=True, slots=True)
class Affine:
    """sum(coefficient * atom) + const, with non-zero coefficients and each atom once, in a fixed order."""

    terms: tuple[tuple[Expr, int], ...]
    const: int

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.terms, self.const + other)
        return _collect((*self.terms, *other.terms), self.const + other.const)

    def __sub__(self, other: Affine | int) -> Affine:
        return self + (-other)

    def __neg__(self) -> Affine:
        return self * -1

    def __mul__(self, factor: int) -> Affine:
        if factor == 0:
            return Affine((), 0)
        return Affine(tuple((atom, c * factor) for atom, c in self.terms), self.const * factor)

    @property
    def expr(self) -> Expr:
        """Writes the sum as an expression that reads well: `q_hi + N - M + 1`."""
        terms = self.terms
        spend(4 * len(terms))
        if len(terms) > 1:
            atoms = {atom for atom, _ in terms}
            aligned = {Dim("N"), Dim("M")} <= atoms and any(isinstance(atom, Index) for atom in atoms)
            terms = tuple(sorted(terms, key=partial(_reading_order, aligned=aligned)))
        first = next((i for i, (_, c) in enumerate(terms) if c > 0), None)
        if first is None:  # 7 - kv_idx
            start, rest, end = self.const, terms, 0
        else:
            start, rest, end = 0, (terms[first], *terms[:first], *terms[first + 1 :]), self.const
        total: Expr = Const(start)
        for atom, c in rest:
            total = add(total, mul(atom, Const(c))) if c > 0 else sub(total, mul(atom, Const(-c)))
        return add(total, Const(end))


@memo
def affine(expr: Expr) -> Affine:
    """The normal form of an int expression; q_pos becomes q_idx + N - M."""
    spend(2)
    match expr:
        case Const(value=value):
            return Affine((), int(value))
        case Index(name="q_pos"):
            return _collect([(Index("q_idx"), 1), (Dim("N"), 1), (Dim("M"), -1)], 0)
        case Neg(operand=operand):
            return -affine(operand)
        case Binary(op="+", left=left, right=right):
            return affine(left) + affine(right)
        case Binary(op="-", left=left, right=right):
            return affine(left) - affine(right)
        case Binary(op="*", left=left, right=right):
            a, b = affine(left), affine(right)
            if not a.terms:
                return b * a.const
            if not b.terms:
                return a * b.const
            return _atom(mul(a.expr, b.expr))
        case Binary(op="//", left=left, right=right):
            return _quotient(affine(left), affine(right))
        case Binary(op="%", left=left, right=right):
            return _remainder(affine(left), affine(right))
        case _:
            return _atom(make(expr, tuple(map(normalize, children(expr)))))


def normalize(expr: Expr) -> Expr:
    """The tree with every int subexpression in normal form."""
    if expr.type == "int":
        return affine(expr).expr
    return make(expr, tuple(map(normalize, children(expr))))


def _quotient(dividend: Affine, divisor: Affine) -> Affine:
    if divisor.terms or divisor.const == 0:
        return _atom(floordiv(dividend.expr, divisor.expr))
    if divisor.const < 0:
        dividend, divisor = -dividend, -divisor
    size = divisor.const
    whole, rest = _split(dividend, size)
    return whole if not rest.terms else whole + _atom(floordiv(rest.expr, Const(size)))


def _remainder(dividend: Affine, divisor: Affine) -> Affine:
    if divisor.terms or divisor.const <= 0:
        return _atom(mod(dividend.expr, divisor.expr))
    _, rest = _split(dividend, divisor.const)
    return rest if not rest.terms else _atom(mod(rest.expr, divisor.expr))


def _split(total: Affine, size: int) -> tuple[Affine, Affine]:
    """(whole, rest) with total = size * whole + rest; a constant below size stays in rest, as written."""
    whole = [(atom, c // size) for atom, c in total.terms if c % size == 0]
    rest = [(atom, c) for atom, c in total.terms if c % size]
    steps = total.const // size if not rest or total.const > 0 else -(-total.const // size)
    return _collect(whole, steps), _collect(rest, total.const - steps * size)


def _atom(expr: Expr) -> Affine:
    simple = _simplified(expr)
    if isinstance(simple, Const | Neg) or (isinstance(simple, Binary) and simple.op in ("+", "-")):
        return affine(simple)
    return Affine(((simple, 1),), 0)


_simplified = memo(simplify)


def _collect(terms: Iterable[tuple[Expr, int]], const: int) -> Affine:
    total: dict[Expr, int] = {}
    for atom, c in terms:
        spend(2)
        total[atom] = total.get(atom, 0) + c
    kept = [(atom, c) for atom, c in total.items() if c]
    if len(kept) > 1:
        kept.sort(key=lambda term: show(term[0]))
    return Affine(tuple(kept), const)


def _reading_order(term: tuple[Expr, int], *, aligned: bool) -> tuple[int, bool, bool, str]:
    """Positions first, and what aligns them, then what was loaded or computed, other sizes last: `q_lo + N -
    M + shift[b] + H`. In this order a sum stays a position for as long as it can.
    """
    atom, c = term
    match atom:
        case Index():
            rank = 0
        case Dim(name="N" | "M") if aligned:
            rank = 0
        case Load() | Call():
            rank = 1
        case Dim():
            rank = 3
        case _:
            rank = 2
    return rank, isinstance(atom, Dim), c < 0, show(atom)
