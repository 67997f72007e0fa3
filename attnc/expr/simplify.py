"""Trees rebuilt with the smart constructors: `simplify`, `substitute` and the negation normal form.

Everything that makes expressions makes them with the constructors of `arithmetic` and `logic`, or by `call`
and `make` here, so that what reaches a generated kernel is small. Nothing is assumed about lengths or
contents of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attnc.effort import spend
from attnc.expr.arithmetic import binary, maximum, minimum, neg, number
from attnc.expr.functions import REAL
from attnc.expr.logic import NEGATED, compare, conj, disj, negate, where
from attnc.expr.nodes import (
    And,
    Binary,
    Call,
    Compare,
    Const,
    Expr,
    Load,
    Neg,
    Not,
    Or,
    Search,
    children,
    rebuild,
)


def call(function: str, *args: Expr) -> Expr:
    """Builds function(args), folded where the arguments are constants and the value is finite."""
    match function:
        case "min":
            return minimum(*args)
        case "max":
            return maximum(*args)
        case "where":
            return where(*args)
    value = number(args[0])
    if value is None:
        return Call(function, args)
    if function == "abs":
        return Const(abs(value))
    try:
        return Const(REAL[function].value(value))
    except (ValueError, OverflowError):  # log(-1), exp(1000): left for run time, which has NaN and inf
        return Call(function, args)


def make(expr: Expr, operands: tuple[Expr, ...]) -> Expr:
    """The node `expr` over new operands, simplified; the result keeps a span."""
    spend()
    match expr:
        case Neg():
            made = neg(operands[0])
        case Binary(op=op):
            made = binary(op, *operands)
        case Compare(op=op):
            made = compare(op, *operands)
        case And():
            made = conj(*operands)
        case Or():
            made = disj(*operands)
        case Not():
            made = negate(operands[0])
        case Call(function=function):
            made = call(function, *operands)
        case _:
            return rebuild(expr, operands)
    return replace(made, span=expr.span) if made.span is None and expr.span is not None else made


def simplify(expr: Expr) -> Expr:
    """The whole tree rebuilt with the constructors above."""
    return substitute(expr, {})


def substitute(expr: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    """Every node that is a key of `mapping` (a Param, Index, Dim, or any other) replaced, and the tree
    simplified.

    Extents of loads are rewritten too. Replacements are not searched again.
    """
    if mapping and (found := mapping.get(expr)) is not None:
        return found
    made = make(expr, tuple(substitute(child, mapping) for child in children(expr)))
    if mapping and isinstance(made, Load | Search):
        return replace(made, extents=tuple(substitute(extent, mapping) for extent in made.extents))
    return made


def nnf(mask: Expr) -> Expr:
    """Negation normal form: `not` only around bool loads; == and != of bools and `where` of bools become
    and/or."""
    return _nnf(mask, positive=True)


def _nnf(mask: Expr, *, positive: bool) -> Expr:
    match mask:
        case Not(operand=operand):
            return _nnf(operand, positive=not positive)
        case And(operands=operands) | Or(operands=operands):
            join = conj if isinstance(mask, And) == positive else disj
            return join(*(_nnf(operand, positive=positive) for operand in operands))
        case Compare(op="==" | "!=" as op, left=left, right=right) if left.type == "bool":
            same = disj(conj(left, right), conj(negate(left), negate(right)))
            return _nnf(same, positive=positive == (op == "=="))
        case Call(function="where", args=(condition, then, other)):
            return _nnf(disj(conj(condition, then), conj(negate(condition), other)), positive=positive)
        case Compare(op=op, left=left, right=right):
            return compare(op if positive else NEGATED[op], simplify(left), simplify(right))
        case _:
            return simplify(mask) if positive else negate(simplify(mask))
