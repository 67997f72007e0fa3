"""Masks that are an interval of keys for each row, of which a thread keeps the elements by bits.

Where a row's keys begin and end is known before any element is looked at. A word of bits for a row and tile
takes some ten instructions, and the compiler moves several of them to predicates at once, where comparisons
with both ends and an `and` would be three instructions for each element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnc.expr.affine import affine
from attnc.expr.construct import MIRRORED, add, maximum, minimum
from attnc.expr.nodes import And, Compare, CompareOp, Const, Expr, Index, Or
from attnc.plan.loads import axes_of
from attnc.plan.width import is_wide

_KEY = Index("kv_idx")
_ONE = Const(1)


@dataclass(frozen=True, slots=True)
class Ends:
    """The first key that a row keeps, and the one behind the last; None where nothing bounds them."""

    first: Expr | None
    end: Expr | None


def row_ends(keep: Expr) -> Ends | None:
    """Of a mask that is true between its ends alone; None of any other."""
    match keep:
        case And(operands=operands):
            return _joined(operands, maximum, minimum)
        case Or(operands=operands):
            found = _joined(operands, minimum, maximum)
            return found if found is None or None in (found.first, found.end) else None  # no hull
        case Compare(op=op, left=left, right=right) if left.type == right.type == "int":
            return _compared(op, left, right)
        case _:
            return None


def _joined(
    operands: tuple[Expr, ...],
    of_first: Callable[[Expr, Expr], Expr],
    of_end: Callable[[Expr, Expr], Expr],
) -> Ends | None:
    first: Expr | None = None
    end: Expr | None = None
    for operand in operands:
        found = row_ends(operand)
        if found is None:
            return None
        if found.first is not None:
            first = found.first if first is None else of_first(first, found.first)
        if found.end is not None:
            end = found.end if end is None else of_end(end, found.end)
    return Ends(first, end)


def _compared(op: CompareOp, left: Expr, right: Expr) -> Ends | None:
    """kv_idx, or a sum with it, beside a value of the row."""
    if left == _KEY:
        value = right
    elif right == _KEY:
        op, value = MIRRORED[op], left
    else:
        terms = affine(left) - affine(right)
        step = dict(terms.terms).get(_KEY, 0)
        if abs(step) != 1:
            return None
        value = ((terms - affine(_KEY) * step) * -step).expr
        op = op if step > 0 else MIRRORED[op]
    if op in ("<=", ">"):
        value = add(value, _ONE)
    if op in ("==", "!=") or "kv" in axes_of(value) or is_wide(value):
        return None
    return Ends(None, value) if op in ("<", "<=") else Ends(value, None)
