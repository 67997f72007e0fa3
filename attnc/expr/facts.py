"""What holds for every tile, and the little proving that it allows.

Where a tile is, it is a non-empty box: 0 <= q_lo <= q_hi < M and 0 <= kv_lo <= kv_hi < N. Sizes are not
negative; a sequence may be empty, since the bounds of a loop are computed before anything is known of its
tiles. A proof here removes a `max`, a test or a whole loop from a kernel; where none is found the code is
longer, never wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from attnc.effort import memo
from attnc.expr.affine import Affine, affine
from attnc.expr.arithmetic import ZERO, maximum, minimum, number
from attnc.expr.logic import MIRRORED, NEGATED, compare
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
    Search,
)

Q_LO, Q_HI, KV_LO, KV_HI = Index("q_lo"), Index("q_hi"), Index("kv_lo"), Index("kv_hi")
M, N = Dim("M"), Dim("N")

#: index -> (lowest position, highest position, number of positions)
TILE: Mapping[str, tuple[Expr, Expr, Expr]] = {"q_idx": (Q_LO, Q_HI, M), "kv_idx": (KV_LO, KV_HI, N)}

_ORDER = (Q_HI, KV_HI, Q_LO, KV_LO)


@memo
def at_least(left: Expr, right: Expr, given: Expr = TRUE) -> bool:
    """Whether left >= right is proved for every tile for which `given` holds."""
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


def _slack(fact: Expr) -> Affine | None:
    """A sum that is >= 0 because an int comparison holds."""
    match fact:
        case Compare(op="<" | "<=" as op, left=left, right=right) if left.type == right.type == "int":
            return affine(right) - affine(left) - (op == "<")
        case Compare(op=">" | ">=" as op, left=left, right=right) if left.type == right.type == "int":
            return affine(left) - affine(right) - (op == ">")
        case _:
            return None


def _is_natural(total: Affine) -> bool:
    """Whether total >= 0: indices give way to the ends of their ranges, one at a time, until sizes are
    left."""
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
    """A lower bound of total that does not use `index`."""
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
    """A constant lower bound of an atom."""
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
    """An upper bound of an atom: a constant or a size."""
    match atom:
        case Search(extents=extents):
            return extents[-1]
        case Binary(op="%", right=right) if (size := number(right) or 0) > 0:
            return Const(size - 1)
        case _:
            return None


def smaller(left: Expr, right: Expr) -> Expr:
    """min(left, right), decided now if possible."""
    return left if at_least(right, left) else right if at_least(left, right) else minimum(left, right)


def larger(left: Expr, right: Expr) -> Expr:
    """max(left, right), decided now if possible."""
    return left if at_least(left, right) else right if at_least(right, left) else maximum(left, right)


def relate(op: CompareOp, left: Expr, right: Expr) -> Expr:
    """left <op> right between ints, decided now if possible, else with positions on the left: `kv_lo <= q_hi
    + N - M`."""
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
    """The terms that read best on the left: those of kv, or of q as a position, or else the positive ones."""
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
    """expr + offset, inside min and max so that `at_least` can still take them apart."""
    if isinstance(expr, Call) and expr.function in ("min", "max"):
        return Call(expr.function, tuple(shift(arg, offset) for arg in expr.args))
    return (affine(expr) + offset).expr
