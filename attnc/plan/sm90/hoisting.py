"""What of a score and of a mask is not computed element by element: once for a key, by the warp that loads
what is asked of keys, or once for a row and tile.

An element pays for each of its instructions as often as the mask keeps elements, and at D = 128 five of
them take as long as its products. So an expression of the key alone (`bias[b, kv_idx] * log2(e)`) comes
through shared memory as one number; and of an integer that grows with the key (`q_pos - kv_idx`) a thread
converts its value at the thread's first key, from which those of its other keys differ by constants. Up
to 2^24 that is exact in float32, and beyond it is rounded twice (`verify.running_error`).

Of a mask that is an interval of keys for each row, a thread keeps the elements by bits. Where a row's
keys begin and end is known before any element is looked at. A word of bits for a row and tile takes some
ten instructions, and the compiler moves several of them to predicates at once, where comparisons with
both ends and an `and` would be three instructions for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from attnc.expr.affine import affine
from attnc.expr.construct import MIRRORED, add, maximum, minimum, mul, sub
from attnc.expr.nodes import (
    And,
    Binary,
    Call,
    Compare,
    CompareOp,
    Const,
    Dot,
    Expr,
    Index,
    Neg,
    Or,
    Ref,
    children,
    walk,
)
from attnc.expr.simplify import make, scale_by, substitute
from attnc.plan.ir import Fetch, Let
from attnc.plan.loads import axes_of
from attnc.plan.sm90.scores import Column, columns_of
from attnc.plan.steps import fetches_for
from attnc.plan.width import is_wide

_KEY = Index("kv_idx")
_ONE = Const(1)


@dataclass(frozen=True, slots=True)
class Ends:
    """The first key that a row keeps, and the one behind the last; None where nothing bounds them."""

    first: Expr | None
    end: Expr | None


def row_ends(keep: Expr) -> Ends | None:
    """Returns the ends of a mask that is true between them alone; None for any other."""
    match keep:
        case And(operands=operands):
            return _join_ends(operands, maximum, minimum)
        case Or(operands=operands):
            found = _join_ends(operands, minimum, maximum)
            return found if found is None or None in (found.first, found.end) else None  # no hull
        case Compare(op=op, left=left, right=right) if left.type == right.type == "int":
            return _find_ends(op, left, right)
        case _:
            return None


def _join_ends(
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


def _find_ends(op: CompareOp, left: Expr, right: Expr) -> Ends | None:
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


#: Columns between a thread's first key and the one at hand, a constant; that first key.
COLUMN = Ref("column", "float", ("kv",))
FIRST_KEY = Ref("first_key", "int", natural=True, within=(0, 2**30))
#: Names of what is computed once; what finds none left stays where it is.
_AT_FIRST = ("at_first", "at_first_2", "at_first_3", "at_first_4")
_OF_KEY = ("of_key", "of_key_2", "of_key_3", "of_key_4")


@dataclass(frozen=True, slots=True)
class HoistedScore:
    """A score without its common parts. value: of an element; keys: values of each key; rows: floats of a
    row at a thread's first key, or of all rows. columns: what tensor cores add to
    `product`; of_row: what is left of a row.
    """

    value: Expr
    keys: tuple[Let, ...] = ()
    rows: tuple[Let, ...] = ()
    columns: tuple[Column, ...] = ()
    product: Expr | None = None
    of_row: Expr | None = None


def in_columns(score: Expr, mask: Expr) -> HoistedScore:
    """Returns the score of a layout whose tensor cores add what is not of the product."""
    found = columns_of(score, mask)
    assert found is not None
    value = found.product if found.row is None else add(found.product, Ref("of_row", "float", ("q",)))
    return HoistedScore(value, columns=found.terms, product=found.product, of_row=found.row)


def shared_score(score: Expr, vectors: Iterable[Fetch], elsewhere: Iterable[Expr]) -> HoistedScore:
    """Returns the score with those parts named. vectors: loads with a value for each key that come through
    shared memory; elsewhere: what reads loads besides.
    """
    loaded = tuple(vectors)
    taken = {fetch.name for fetch in fetches_for(loaded, *elsewhere)}
    parts = _Parts(frozenset(fetch.name for fetch in loaded), taken)
    value = parts.name_key_parts(score)
    if taken & {name for let in parts.keys for name in _names(let.value)} or _share(parts.keys):
        parts, value = _Parts(frozenset(), set()), score  # they would take more room than the loads
    value = parts.name_row_parts(value)
    return HoistedScore(value, tuple(parts.keys), tuple(parts.rows))


def product_exponent(score: HoistedScore, scale: float | None) -> Expr:
    """Returns what `exponent` does, where all but the product is of a row, and `base` has both that a row
    subtracts.
    """
    assert score.product is not None
    shift = Ref("m" if score.of_row is None else "base", "float", ("q",))
    return Binary("-", score.product if scale is None else scale_by(score.product, scale), shift)


def exponent(value: Expr, scale: float | None) -> Expr:
    """Returns scale * value - m, the subtraction where it meets the product: `(s * c - m) + bias` is one
    fused multiply-add less than `(s * c + bias) - m`. What it is rounded by is no more: |s c - m| <= |s c| +
    |m|.
    """
    return _minus(value if scale is None else scale_by(value, scale))


def _minus(expr: Expr) -> Expr:
    match expr:
        case Binary(op="+", left=left, right=right) if _has_product(right) and not _has_product(left):
            return Binary("+", left, _minus(right))
        case Binary(op="+" | "-" as op, left=left, right=right) if _has_product(left):
            return Binary(op, _minus(left), right)
        case _:
            return Binary("-", expr, Ref("m", "float", ("q",)))


def _has_product(expr: Expr) -> bool:
    return any(isinstance(node, Dot) for node in walk(expr))


@dataclass(slots=True)
class _Parts:
    vectors: frozenset[str]
    taken: set[str]
    keys: list[Let] = field(default_factory=list)
    rows: list[Let] = field(default_factory=list)

    def name_key_parts(self, expr: Expr) -> Expr:
        """Returns it with expressions of the key alone by name; loads that remain are taken."""
        if isinstance(expr, Ref):
            self.taken |= {expr.name} & self.vectors
            return expr
        alone = axes_of(expr) == ("kv",) and not _has_product(expr) and _KEY not in walk(expr)
        if expr.type == "float" and alone and _names(expr) & self.vectors:
            name = _pick_name(self.keys, expr, _OF_KEY)
            if name is not None:
                return Ref(name, "float", ("kv",))
        return make(expr, tuple(map(self.name_key_parts, children(expr))))

    def name_row_parts(self, expr: Expr) -> Expr:
        if expr.type != "float":
            return expr
        return make(expr, tuple(self._as_float(child) for child in children(expr)))

    def _as_float(self, expr: Expr) -> Expr:
        match expr:
            case _ if expr.type != "int":
                return self.name_row_parts(expr)
            case Neg(operand=operand) | Call(function="abs", args=(operand,)):
                found = self._as_float(operand)
                return expr if found == operand else make(expr, (found,))
        terms = dict(affine(expr).terms)
        step = terms.pop(_KEY, 0)
        if not step or is_wide(expr) or any("kv" in axes_of(atom) for atom in terms):
            return expr
        start = substitute(expr, {_KEY: FIRST_KEY})
        name = _pick_name(self.rows, start, _AT_FIRST)
        if name is None:
            return expr
        first = Ref(name, "float", axes_of(start))
        return add(first, mul(COLUMN, Const(step))) if step > 0 else sub(first, mul(COLUMN, Const(-step)))


def _pick_name(lets: list[Let], value: Expr, names: tuple[str, ...]) -> str | None:
    known = next((let.name for let in lets if let.value == value), None)
    if known is None and len(lets) < len(names):
        known = names[len(lets)]
        lets.append(Let(name=known, value=value))
    return known


def _names(expr: Expr) -> set[str]:
    return {node.name for node in walk(expr) if isinstance(node, Ref)}


def _share(lets: Iterable[Let]) -> bool:
    names = [name for let in lets for name in _names(let.value)]
    return len(names) != len(set(names))
