"""Parts of a score that no thread computes element by element: terms that tensor cores add to the products,
and a load of each query and key that comes as tiles.

A term may be a number of the row times a number of the key. `slope[h] * (q_pos - kv_idx)` is a number of
the row and, for each key of a tile, `slope[h]` times how far the key is from the tile's first one;
`bias[b, kv_idx]` is a number of the key. Added element by element, such a term costs an instruction or
two for each, and at D = 128 five of them take as long as the products. As one more step of 16 in the
depth of q k^T it costs an eighth of that product: q has the factors there, and k the numbers of its keys,
of which one tile of 16 bytes a key holds eight. They are bf16, three for a float32, which they give
exactly; the sum is that of a product, in float32.

A load with a value for each query and key, `bias[b, h, q_idx, kv_idx]`, is one of 2 or 4 bytes in the
middle of the softmax, eight rows of 8 bytes for a warp. As a tile beside each tile of keys it comes ahead
of its turn, in boxes of 128 bytes a row; and as its rows and columns are those of the scores, a warp
reads 16-bit values by ldmatrix as its scores lie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from attnc.expr.affine import Affine, affine
from attnc.expr.construct import add, mul, neg
from attnc.expr.nodes import (
    TRUE,
    And,
    Binary,
    Call,
    Compare,
    Const,
    Dot,
    Expr,
    Index,
    Load,
    Neg,
    Ref,
    children,
    walk,
)
from attnc.expr.simplify import make, substitute
from attnc.model.dtypes import DType
from attnc.plan.loads import axes_of
from attnc.plan.width import is_wide

#: Bytes of a key in the tile of such numbers; terms that it has room for.
COLUMN_BYTES, MOST_TERMS = 16, 2
#: Factors of the product by which terms are divided, and stay float32.
_FACTORS = (2.0**-20, 2.0**20)
#: The first key of the tile at hand.
TILE_KEY = Ref("kv_lo", "int", natural=True, within=(0, 2**30))
_KEY = Index("kv_idx")


@dataclass(frozen=True, slots=True)
class Column:
    """A term in units of the product. factor: of a row; of_key: the other factor, a number of each key, where
    `factor` is 1; None: how far the key is from the tile's first one.
    """

    factor: Expr
    of_key: Expr | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """A score as product + row + columns. product: with its factor c; row: what is left of a row, None: 0."""

    product: Expr
    c: float
    row: Expr | None
    terms: tuple[Column, ...]


def columns_of(score: Expr, mask: Expr = TRUE) -> Columns | None:
    """Returns the score so, if it is nothing else; None otherwise, and where there is no such term. mask:
    which keys a score is asked for, by which |q_pos - kv_idx| is q_pos - kv_idx under a causal one.
    """
    score = _without_abs(score, frozenset(_at_least_zero(mask)))
    product: Expr | None = None
    c, row, terms = 1.0, None, []
    for sign, addend in _addends(score, 1):
        if any(isinstance(node, Dot) for node in walk(addend)):
            factor = _factor(addend)
            if product is not None or factor is None:
                return None
            product, c = (addend, factor) if sign > 0 else (neg(addend), -factor)
            continue
        found = _term(addend)
        if found is None:
            return None
        column, rest = found
        if column is not None:
            terms.append(column if sign > 0 else _negate(column))
        if rest is not None:
            rest = rest if sign > 0 else neg(rest)
            row = rest if row is None else add(row, rest)
    if product is None or not terms or len(terms) > MOST_TERMS or not _FACTORS[0] <= abs(c) <= _FACTORS[1]:
        return None
    return Columns(product, c, row, tuple(_in_units(term, 1 / c) for term in terms))


def _at_least_zero(mask: Expr) -> Iterator[Affine]:
    match mask:
        case And(operands=operands):
            for operand in operands:
                yield from _at_least_zero(operand)
        case Compare(op="<=" | "<", left=left, right=right) if left.type == right.type == "int":
            yield affine(right) - affine(left)
        case Compare(op=">=" | ">", left=left, right=right) if left.type == right.type == "int":
            yield affine(left) - affine(right)


def _without_abs(expr: Expr, known: frozenset[Affine]) -> Expr:
    match expr:
        case Call(function="abs", args=(x,)) if x.type == "int" and affine(x) in known:
            return x
        case Call(function="abs", args=(x,)) if x.type == "int" and -affine(x) in known:
            return neg(x)
        case _:
            return make(expr, tuple(_without_abs(child, known) for child in children(expr)))


def _addends(expr: Expr, sign: int) -> Iterator[tuple[int, Expr]]:
    match expr:
        case Binary(op="+" | "-" as op, left=left, right=right) if expr.type == "float":
            yield from _addends(left, sign)
            yield from _addends(right, sign if op == "+" else -sign)
        case Neg(operand=operand) if expr.type == "float":
            yield from _addends(operand, -sign)
        case _:
            yield sign, expr


def _factor(product: Expr) -> float | None:
    match product:
        case Dot():
            return 1.0
        case (
            Binary(op="*", left=Dot(), right=Const(value=value))
            | Binary(op="*", left=Const(value=value), right=Dot())
        ):
            return float(value)
        case _:
            return None


def _term(addend: Expr) -> tuple[Column | None, Expr | None] | None:
    axes = axes_of(addend)
    if "kv" not in axes:
        return None, addend
    if addend.type == "float" and axes == ("kv",) and not _reads_position(addend):
        return Column(Const(1.0), addend), None
    match addend:
        case Binary(op="*", left=factor, right=position) if factor.type == "float" and position.type == "int":
            return _split_position(factor, position)
        case Binary(op="*", left=position, right=factor) if factor.type == "float" and position.type == "int":
            return _split_position(factor, position)
        case _ if addend.type == "int":
            return _split_position(Const(1.0), addend)
        case _:
            return None


def _split_position(factor: Expr, position: Expr) -> tuple[Column | None, Expr | None] | None:
    terms = dict(affine(position).terms)
    step = terms.pop(_KEY, 0)
    if not step or abs(step) > 1 or "kv" in axes_of(factor) or is_wide(position):
        return None
    if any("kv" in axes_of(atom) for atom in terms):
        return None
    first = substitute(position, {_KEY: TILE_KEY})
    return Column(mul(factor, Const(float(step)))), Binary("*", factor, first)


def _reads_position(expr: Expr) -> bool:
    return expr == _KEY or (not isinstance(expr, Load) and any(map(_reads_position, children(expr))))


def _negate(column: Column) -> Column:
    if column.of_key is not None:
        return Column(column.factor, neg(column.of_key))
    return Column(neg(column.factor))


def _in_units(column: Column, factor: float) -> Column:
    if factor == 1.0:
        return column
    if column.of_key is not None:
        return Column(column.factor, mul(column.of_key, Const(factor)))
    return Column(mul(column.factor, Const(factor)))


#: Tiles in shared memory, the most first: one can be copied while the one before is read.
PAIR_STAGES = (2, 1)
#: Axes in front of the last two that a box has room for.
_MOST_AXES = 2
_LAST = (Index("q_idx"), Index("kv_idx"))


def pair_of(score: Expr, mask: Expr, dtypes: dict[str, DType]) -> Load | None:
    """Returns the first such load of the score that the mask does not read too; None if there is none."""
    asked: Collection[Expr] = frozenset(walk(mask))
    for node in walk(score):
        if isinstance(node, Load) and node not in asked and is_pair(node) and dtypes[node.tensor].is_float:
            return node
    return None


def is_pair(load: Load) -> bool:
    """Returns whether a tile of queries and keys is a box of the tensor: its last axes are theirs, and the
    others are the same for all of the tile. What lies outside of the tensor is 0 in boxes as in loads.
    """
    others = load.indices[:-2]
    if load.indices[-2:] != _LAST or len(others) > _MOST_AXES:
        return False
    return all(
        not axes_of(index) and not is_wide(index) and not any(isinstance(node, Load) for node in walk(index))
        for index in others
    )
