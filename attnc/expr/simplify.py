"""Smart constructors: build a node, folding constants and identities on the way.

Everything that makes expressions makes them here, so that what reaches a generated kernel is small. Each
constructor returns an expression of the same value *and type* as the plain node; floats are real numbers, so
constant factors may be reassociated, but nothing is assumed about lengths or contents of tensors. Order of
operands is kept: the same input always gives the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from attnc.expr.nodes import (
    FALSE,
    TRUE,
    And,
    Binary,
    BinaryOp,
    Call,
    Compare,
    CompareOp,
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

ZERO, ONE = Const(0), Const(1)

#: not (a < b)  <=>  a >= b; and a < b  <=>  b > a
NEGATED: Mapping[CompareOp, CompareOp] = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
MIRRORED: Mapping[CompareOp, CompareOp] = {"==": "==", "!=": "!=", "<": ">", ">": "<", "<=": ">=", ">=": "<="}

_COMPARISONS: Mapping[CompareOp, Callable[[float, float], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def number(expr: Expr) -> int | float | None:
    """The value of an int or float constant, else None."""
    if isinstance(expr, Const) and not isinstance(expr.value, bool):
        return expr.value
    return None


def add(left: Expr, right: Expr) -> Expr:
    a, b = number(left), number(right)
    if a is not None and b is not None:
        return Const(a + b)
    if b == 0 and _keeps_type(left, right):
        return left
    if a == 0 and _keeps_type(right, left):
        return right
    if isinstance(right, Neg):
        return sub(left, right.operand)
    if isinstance(right, Const) and right.type == "int":
        return _shift(left, int(right.value))
    return Binary("+", left, right)


def sub(left: Expr, right: Expr) -> Expr:
    a, b = number(left), number(right)
    if a is not None and b is not None:
        return Const(a - b)
    if b == 0 and _keeps_type(left, right):
        return left
    if a == 0 and _keeps_type(right, left):
        return neg(right)
    if isinstance(right, Neg):
        return add(left, right.operand)
    if left == right and left.type == "int":
        return ZERO
    if isinstance(right, Const) and right.type == "int":
        return _shift(left, -int(right.value))
    return Binary("-", left, right)


def _shift(expr: Expr, offset: int) -> Expr:
    """expr + offset, merged with a constant that the sum already ends with."""
    if isinstance(expr, Binary) and expr.type == "int" and isinstance(expr.right, Const):
        if expr.op == "+":
            return add(expr.left, Const(int(expr.right.value) + offset))
        if expr.op == "-":
            return add(expr.left, Const(offset - int(expr.right.value)))
    return Binary("+", expr, Const(offset)) if offset >= 0 else Binary("-", expr, Const(-offset))


def neg(operand: Expr) -> Expr:
    value = number(operand)
    if value is not None:
        return Const(-value)
    if isinstance(operand, Neg):
        return operand.operand
    if isinstance(operand, Binary) and operand.op == "-":
        return sub(operand.right, operand.left)
    return Neg(operand)


def mul(left: Expr, right: Expr) -> Expr:
    a, b = number(left), number(right)
    if a is not None and b is not None:
        return Const(a * b)
    if b is not None:
        return _times(left, right, b)
    if a is not None:
        return _times(right, left, a, flipped=True)
    return Binary("*", left, right)


def _times(expr: Expr, factor: Expr, value: int | float, *, flipped: bool = False) -> Expr:
    """expr * value (value * expr if `flipped`), merged with a constant factor that expr already has."""
    if _keeps_type(expr, factor):
        if value == 1:
            return expr
        if value == -1:
            return neg(expr)
        if value == 0 and expr.type == "int":
            return ZERO
    if isinstance(expr, Binary):
        inner_left, inner_right = number(expr.left), number(expr.right)
        if expr.op == "*" and inner_right is not None:
            return mul(expr.left, Const(inner_right * value))
        if expr.op == "*" and inner_left is not None:
            return mul(Const(inner_left * value), expr.right)
        if expr.op == "/" and inner_right:
            return mul(expr.left, Const(value / inner_right))
    return Binary("*", factor, expr) if flipped else Binary("*", expr, factor)


def div(left: Expr, right: Expr) -> Expr:
    a, b = number(left), number(right)
    if a is not None and b:
        return Const(a / b)
    if b == 1 and left.type == "float":
        return left
    if b and isinstance(left, Binary) and left.type == "float":
        inner_left, inner_right = number(left.left), number(left.right)
        if left.op == "*" and inner_right is not None:
            return mul(left.left, Const(inner_right / b))
        if left.op == "*" and inner_left is not None:
            return mul(Const(inner_left / b), left.right)
        if left.op == "/" and inner_right:
            return div(left.left, Const(inner_right * b))
    return Binary("/", left, right)


def floordiv(left: Expr, right: Expr) -> Expr:
    a, b = number(left), number(right)
    if a is not None and b:
        return Const(a // b)
    if b == 1 and left.type == right.type == "int":
        return left
    if b is not None and b < 0 and right.type == "int":
        return floordiv(neg(left), Const(-b))
    return Binary("//", left, right)


def mod(left: Expr, right: Expr) -> Expr:
    a, b = number(left), number(right)
    if a is not None and b:
        return Const(a % b)
    if b == 1 and left.type == right.type == "int":
        return ZERO
    if b is not None and b < 0 and right.type == "int":
        return neg(mod(neg(left), Const(-b)))
    return Binary("%", left, right)


_BINARY: Mapping[BinaryOp, Callable[[Expr, Expr], Expr]] = {
    "+": add, "-": sub, "*": mul, "/": div, "//": floordiv, "%": mod,
}  # fmt: skip


def binary(op: BinaryOp, left: Expr, right: Expr) -> Expr:
    return _BINARY[op](left, right)


def minimum(left: Expr, right: Expr) -> Expr:
    a, b = number(left), number(right)
    if a is not None and b is not None and left.type == right.type:
        return left if a <= b else right
    return left if left == right else Call("min", (left, right))


def maximum(left: Expr, right: Expr) -> Expr:
    a, b = number(left), number(right)
    if a is not None and b is not None and left.type == right.type:
        return left if a >= b else right
    return left if left == right else Call("max", (left, right))


def where(condition: Expr, then: Expr, other: Expr) -> Expr:
    """`then` if the condition holds, else `other`; bool branches become and/or."""
    chosen = then if condition == TRUE or then == other else other if condition == FALSE else None
    if chosen is not None and _keeps_type(chosen, then) and _keeps_type(chosen, other):
        return chosen
    if then.type == other.type == "bool":
        return disj(conj(condition, then), conj(negate(condition), other))
    return Call("where", (condition, then, other))


_REAL_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "exp": math.exp, "log": math.log, "tanh": math.tanh, "sqrt": math.sqrt,
}  # fmt: skip


def call(function: str, *args: Expr) -> Expr:
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
        return Const(_REAL_FUNCTIONS[function](value))
    except (ValueError, OverflowError):  # log(-1), exp(1000): left for run time, which has NaN and inf
        return Call(function, args)


def compare(op: CompareOp, left: Expr, right: Expr) -> Expr:
    a, b = number(left), number(right)
    if a is not None and b is not None:
        return Const(_COMPARISONS[op](a, b))
    if left == right and left.type == "int":
        return Const(op in ("==", "<=", ">="))
    return Compare(op, left, right)


def conj(*operands: Expr) -> Expr:
    """and: TRUE when empty."""
    flat = _flatten(operands, And)
    if FALSE in flat:
        return FALSE
    flat = tuple(operand for operand in flat if operand != TRUE)
    return And(flat) if len(flat) > 1 else flat[0] if flat else TRUE


def disj(*operands: Expr) -> Expr:
    """or: FALSE when empty."""
    flat = _flatten(operands, Or)
    if TRUE in flat:
        return TRUE
    flat = tuple(operand for operand in flat if operand != FALSE)
    return Or(flat) if len(flat) > 1 else flat[0] if flat else FALSE


def _flatten(operands: tuple[Expr, ...], kind: type[And] | type[Or]) -> tuple[Expr, ...]:
    """Operands of nested nodes of one kind, each once, in order of first appearance."""
    flat: dict[Expr, None] = {}
    for operand in operands:
        nested = operand.operands if isinstance(operand, kind) else (operand,)
        flat.update(dict.fromkeys(nested))
    return tuple(flat)


def negate(operand: Expr) -> Expr:
    """not, taken into a comparison where there is one."""
    match operand:
        case Const():
            return Const(not operand.value)
        case Not():
            return operand.operand
        case Compare():
            return Compare(NEGATED[operand.op], operand.left, operand.right)
        case _:
            return Not(operand)


def make(expr: Expr, operands: tuple[Expr, ...]) -> Expr:
    """The node `expr` over new operands, simplified; the result keeps a span."""
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
    found = mapping.get(expr)
    if found is not None:
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


def _keeps_type(kept: Expr, dropped: Expr) -> bool:
    return kept.type == dropped.type or (kept.type == "float" and dropped.type == "int")
