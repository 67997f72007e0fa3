"""Integer expressions as sum(c * x) + const, in which every index of a comparison occurs once, and what can
be proved of them for every tile.

`kv_idx - q_pos <= kv_idx` and `q_pos >= 0` have the same normal form, and a sum of distinct atoms takes
its exact bounds over a box at a corner of it. Whatever is not a sum is an atom: an index, a size, a load,
a quotient. Non-goal: identities between atoms beyond `(s * x + r) // s = x + r // s`.

Where a tile is, it is a non-empty box: 0 <= q_lo <= q_hi < M and 0 <= kv_lo <= kv_hi < N. Sizes are not
negative; a sequence may be empty, since the bounds of a loop are computed before anything is known of its
tiles. A proof here removes a `max`, a test or a whole loop from a kernel; where none is found the code is
longer, never wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from attnc.effort import memo, spend
from attnc.expr.construct import (
    MIRRORED,
    NEGATED,
    ZERO,
    add,
    compare,
    floordiv,
    maximum,
    minimum,
    mod,
    mul,
    number,
    sub,
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
    Dim,
    Expr,
    Index,
    Load,
    Neg,
    Search,
    children,
    show,
)
from attnc.expr.simplify import make, simplify

# --- sums


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
    """Returns the normal form of an int expression; q_pos becomes q_idx + N - M."""
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
    """Returns the tree with every int subexpression in normal form."""
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
    """Returns (whole, rest) with total = size * whole + rest; a constant below size stays in rest, as
    written.
    """
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
    """Returns a key that sorts positions first, and what aligns them, then what was loaded or computed, other
    sizes last: `q_lo + N - M + shift[b] + H`. In this order a sum stays a position for as long as it can.
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


# --- what is proved of them for every tile


Q_LO, Q_HI, KV_LO, KV_HI = Index("q_lo"), Index("q_hi"), Index("kv_lo"), Index("kv_hi")
M, N = Dim("M"), Dim("N")

#: index -> (lowest position, highest position, number of positions)
TILE: Mapping[str, tuple[Expr, Expr, Expr]] = {"q_idx": (Q_LO, Q_HI, M), "kv_idx": (KV_LO, KV_HI, N)}

_ORDER = (Q_HI, KV_HI, Q_LO, KV_LO)


@memo
def at_least(left: Expr, right: Expr, given: Expr = TRUE) -> bool:
    """Returns whether left >= right is proved for every tile for which `given` holds."""
    if given != TRUE:
        slacks = map(_slack, given.operands if isinstance(given, And) else (given,))
        gap = affine(left) - affine(right)
        return at_least(left, right) or any(
            slack is not None and _is_natural(gap - slack) for slack in slacks
        )
    match left, right:
        case Call(function="min", args=(a, b)), _:
            return at_least(a, right) and at_least(b, right)
        case _, Call(function="max", args=(a, b)):
            return at_least(left, a) and at_least(left, b)
        case Call(function="max", args=(a, b)), _:
            return at_least(a, right) or at_least(b, right)
        case _, Call(function="min", args=(a, b)):
            return at_least(left, a) or at_least(left, b)
        case _:
            return left.type == right.type == "int" and _is_natural(affine(left) - affine(right))


def lies_inside(index: Expr, size: Expr) -> bool:
    """Returns whether an index is in 0 .. size - 1 by what the two are, wherever a kernel has something to
    do.
    """
    match index, size:
        case Const(value=at), Const(value=extent):
            return 0 <= at < extent
        case _:
            return (index, size) in ((Index("b"), Dim("B")), (Index("h"), Dim("H")))


def _slack(fact: Expr) -> Affine | None:
    match fact:
        case Compare(op="<" | "<=" as op, left=left, right=right) if left.type == right.type == "int":
            return affine(right) - affine(left) - (op == "<")
        case Compare(op=">" | ">=" as op, left=left, right=right) if left.type == right.type == "int":
            return affine(left) - affine(right) - (op == ">")
        case _:
            return None


def _is_natural(total: Affine) -> bool:
    """Returns whether total >= 0: indices give way to the ends of their ranges, one at a time, until sizes
    are left.
    """
    for index in _ORDER:
        total = _without(total, index)
    atoms = sorted((atom for atom, _ in total.terms), key=lambda atom: isinstance(atom, Dim))
    for atom in atoms:  # sizes last: the end of a search is a size
        c = dict(total.terms).get(atom, 0)
        bound = _lower_bound(atom) if c > 0 else _upper_bound(atom)
        if c and bound is None:
            return False
        if bound is not None:
            total = total + (affine(bound) - affine(atom)) * c
    return not total.terms and total.const >= 0


def _without(total: Affine, index: Index) -> Affine:
    c = dict(total.terms).get(index, 0)
    if c == 0:
        return total
    position = "q_idx" if index in (Q_LO, Q_HI) else "kv_idx"
    low, high, size = TILE[position]
    if index == high:
        bound = affine(low) if c > 0 else affine(size) - 1
    else:
        bound = affine(ZERO) if c > 0 else affine(size) - 1
    return total + (bound - affine(index)) * c


def _lower_bound(atom: Expr) -> Expr | None:
    match atom:
        case Dim(name="M"):
            return Const(1)
        case Dim() | Search():
            return ZERO
        case Binary(op="%", right=right) if (number(right) or 0) > 0:
            return ZERO
        case _:
            return None


def _upper_bound(atom: Expr) -> Expr | None:
    match atom:
        case Search(extents=extents):
            return extents[-1]
        case Binary(op="%", right=right) if (size := number(right) or 0) > 0:
            return Const(size - 1)
        case _:
            return None


def smaller(left: Expr, right: Expr) -> Expr:
    """Returns min(left, right), decided now if possible."""
    return left if at_least(right, left) else right if at_least(left, right) else minimum(left, right)


def larger(left: Expr, right: Expr) -> Expr:
    """Returns max(left, right), decided now if possible."""
    return left if at_least(left, right) else right if at_least(right, left) else maximum(left, right)


def relate(op: CompareOp, left: Expr, right: Expr) -> Expr:
    """Returns left <op> right between ints, decided now if possible, else with positions on the left: `kv_lo
    <= q_hi + N - M`.
    """
    match op:
        case "<" | "<=" | ">" | ">=":
            if _proves(op, left, right):
                return TRUE
            if _proves(NEGATED[op], left, right):
                return FALSE
    difference = affine(left) - affine(right)
    if not difference.terms:
        return compare(op, Const(difference.const), ZERO)
    moved = _left_side(difference)
    if any(c > 0 for atom, c in moved.terms if isinstance(atom, Index)) or moved.terms[0][1] > 0:
        return compare(op, moved.expr, (moved - difference).expr)
    return compare(MIRRORED[op], (-moved).expr, (difference - moved).expr)


def _left_side(difference: Affine) -> Affine:
    """Returns the terms that read best on the left: those of kv, or of q as a position, or else the positive
    ones.
    """
    kv = tuple(term for term in difference.terms if term[0] in (KV_LO, KV_HI))
    if kv:
        return Affine(kv, 0)
    q = tuple(term for term in difference.terms if term[0] in (Q_LO, Q_HI))
    if q:
        c = q[0][1]  # q_lo + N - M stays together
        aligned = tuple(term for term in difference.terms if term in ((N, c), (M, -c))) if len(q) == 1 else ()
        return Affine(q + aligned, 0)
    positive = tuple((atom, c) for atom, c in difference.terms if c > 0)
    return Affine(positive or difference.terms, 0)


def _proves(op: CompareOp, left: Expr, right: Expr) -> bool:
    if op in (">", ">="):
        left, right = right, left
    gap = 1 if op in ("<", ">") else 0
    return at_least(right, shift(left, gap))


def shift(expr: Expr, offset: int) -> Expr:
    """Returns expr + offset, inside min and max so that `at_least` can still take them apart."""
    if isinstance(expr, Call) and expr.function in ("min", "max"):
        return Call(expr.function, tuple(shift(arg, offset) for arg in expr.args))
    return (affine(expr) + offset).expr
