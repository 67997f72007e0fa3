"""Trees rebuilt with the smart constructors: `simplify`, `substitute`, the negation normal form, and a score
times a constant.

Expressions are built with the constructors of `construct`, or with `call` and `make`, so that generated
kernels contain small ones. Nothing is assumed about lengths or contents of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import is_

from attnc.effort import spend
from attnc.expr.construct import (
    binary,
    bit,
    compare,
    conj,
    disj,
    div,
    maximum,
    minimum,
    mul,
    neg,
    negate,
    number,
    where,
)
from attnc.expr.functions import REAL
from attnc.expr.nodes import (
    And,
    Binary,
    Call,
    Compare,
    Const,
    Dim,
    Dot,
    Expr,
    Index,
    InList,
    Load,
    Neg,
    Not,
    Or,
    Param,
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
        case "bit":
            return bit(*args)
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
    """Returns the node `expr` over new operands, simplified; the result keeps a span. Where that is no other
    node it is this one, of which hash and nodes are known.
    """
    spend()
    if not operands:
        return expr
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
    if made == expr:
        return expr
    return replace(made, span=expr.span) if made.span is None and expr.span is not None else made


def simplify(expr: Expr) -> Expr:
    """Returns the whole tree rebuilt with the constructors above."""
    return substitute(expr, {})


def substitute(expr: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    """Returns every node that is a key of `mapping` (a Param, Index, Dim, or any other) replaced, and the
    tree simplified.

    Extents of loads and lists are rewritten too. Replacements are not searched again.
    """
    return _substitute(expr, mapping, frozenset(map(type, mapping)))


def _substitute(expr: Expr, mapping: Mapping[Expr, Expr], kinds: frozenset[type]) -> Expr:
    """kinds: the classes of the keys; to look a node up, all below it are hashed."""
    if type(expr) in kinds and (found := mapping.get(expr)) is not None:
        return found
    made = make(expr, tuple([_substitute(child, mapping, kinds) for child in children(expr)]))
    if mapping and isinstance(made, Load | Search | InList):
        extents = tuple([_substitute(extent, mapping, kinds) for extent in made.extents])
        return made if all(map(is_, extents, made.extents)) else replace(made, extents=extents)
    return made


def nnf(mask: Expr) -> Expr:
    """Returns the negation normal form: `not` only around bool loads and what compares floats by their order;
    == and != of bools and `where` of bools become and/or.
    """
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
            condition = compare(op, simplify(left), simplify(right))
            return condition if positive else negate(condition)
        case _:
            return simplify(mask) if positive else negate(simplify(mask))


# --- a score times a constant


def scale_by(expr: Expr, factor: float) -> Expr:
    """Returns expr * factor with the factor folded into constants that are there already, and divisions by
    constants made products.

    Used to move a score to base 2: `cap * tanh(dot / a / cap)` costs no more multiplications than before, and
    in `dot * scale - slope[h] * abs(...)` the factor joins `scale` and the per-head `slope`.
    """
    return _scale(_reciprocals(expr), Const(float(factor)))


def _reciprocals(expr: Expr) -> Expr:
    """Returns every float `x / constant` as `x * (1 / constant)`: a division costs a GPU many
    multiplications.
    """
    operands = tuple(_reciprocals(child) for child in children(expr))
    if isinstance(expr, Binary) and expr.op == "/" and (divisor := number(operands[1])):
        left = operands[0]
        if left.type == "float":
            return mul(left, Const(1 / divisor))
    return make(expr, operands)


def _scale(expr: Expr, factor: Const) -> Expr:
    match expr:
        case _ if expr.type == "int":  # exact, where its scaled parts would be rounded and might cancel
            return mul(expr, factor)
        case Neg(operand=operand):
            return neg(_scale(operand, factor))
        case Binary(op="+" | "-" as op, left=left, right=right) if _absorbs(left) or _absorbs(right):
            return binary(op, _scale(left, factor), _scale(right, factor))
        case Binary(op="*", left=left, right=right):
            if _absorbs(left) or (not _absorbs(right) and not _is_scalar(right) and _is_scalar(left)):
                return mul(_scale(left, factor), right)
            if _absorbs(right) or _is_scalar(right):
                return mul(left, _scale(right, factor))
        case Binary(op="/", left=left, right=right):
            if _absorbs(left):
                return div(_scale(left, factor), right)
            if _is_scalar(right):
                return mul(left, div(factor, right))
        case Call(function="where", args=(condition, then, other)) if _absorbs(then) or _absorbs(other):
            return where(condition, _scale(then, factor), _scale(other, factor))
    return mul(expr, factor)


def _absorbs(expr: Expr) -> bool:
    match expr:
        case Const():
            return True
        case Binary(op="+" | "-") if expr.type == "int":
            return False
        case Neg(operand=operand):
            return _absorbs(operand)
        case Binary(op="*", left=left, right=right):
            return _absorbs(left) or _absorbs(right)
        case Binary(op="/", left=left):
            return _absorbs(left)
        case Binary(op="+" | "-", left=left, right=right):
            return _absorbs(left) and _absorbs(right)
        case _:
            return False


def _is_scalar(expr: Expr) -> bool:
    match expr:
        case Dot() | Param():
            return False
        case Index(name=name):
            return name in ("b", "h")
        case Dim() | Const():
            return True
        case Load(indices=indices):
            return all(_is_scalar(index) for index in indices)
        case _:
            return bool(children(expr)) and all(_is_scalar(child) for child in children(expr))
