"""Expressions as spec text: what `attnc explain`, diagnostics and comments in generated kernels print."""

from __future__ import annotations

from attnc.effort import memo, spend
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
    Load,
    Neg,
    Not,
    Or,
    Param,
    Ref,
    Search,
)

# Binding strength, weakest first; the grammar's order.
_OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _NEG, _ATOM = range(8)


def show(expr: Expr) -> str:
    """The expression in the notation of a spec, with as few parentheses as keep its structure.

    Comparisons that share an operand are chained again; a Search, which no spec can write, reads
    `first(doc[b, :] >= x)`: the first position that satisfies it.
    """
    return _show(expr)[0]


@memo
def _show(expr: Expr) -> tuple[str, int]:
    spend()
    match expr:
        case Const(value=bool() as value):
            return str(value).lower(), _ATOM
        case Const(value=value):
            return repr(value), _NEG if value < 0 else _ATOM
        case Index(name=name) | Dim(name=name) | Param(name=name) | Ref(name=name):
            return name, _ATOM
        case Dot():
            return "dot(q, k)", _ATOM
        case Load(tensor=tensor, indices=indices):
            return (f"{tensor}[{_list(indices)}]" if indices else tensor), _ATOM
        case Search(side=side, tensor=tensor, prefix=prefix, value=value):
            row = ", ".join((*map(show, prefix), ":"))
            return f"first({tensor}[{row}] {'>=' if side == 'lower' else '>'} {_operand(value, _SUM)})", _ATOM
        case Call(function=function, args=args):
            return f"{function}({_list(args)})", _ATOM
        case Neg(operand=operand):
            return f"-{_operand(operand, _NEG)}", _NEG
        case Binary(op=op, left=left, right=right):
            strength = _SUM if op in ("+", "-") else _PRODUCT
            return f"{_operand(left, strength)} {op} {_operand(right, strength + 1)}", strength
        case Compare(op=op, left=left, right=right):
            return f"{_operand(left, _SUM)} {op} {_operand(right, _SUM)}", _COMPARE
        case Not(operand=operand):
            return f"not {_operand(operand, _NOT)}", _NOT
        case And(operands=operands):
            parts = _chains(operands)
            return " and ".join(parts), _AND if len(parts) > 1 else _COMPARE
        case Or(operands=operands):
            return " or ".join(_operand(operand, _OR + 1) for operand in operands), _OR


def _operand(expr: Expr, at_least: int) -> str:
    text, strength = _show(expr)
    return text if strength >= at_least else f"({text})"


def _list(exprs: tuple[Expr, ...]) -> str:
    return ", ".join(map(show, exprs))


def _chains(operands: tuple[Expr, ...]) -> list[str]:
    """The operands of a conjunction; neighbours `a <= b`, `b < c` as `a <= b < c`."""
    parts: list[str] = []
    last: Compare | None = None
    for operand in operands:
        if isinstance(operand, Compare):
            if last is not None and operand.left == last.right and operand.op[0] == last.op[0] in ("<", ">"):
                parts[-1] += f" {operand.op} {_operand(operand.right, _SUM)}"
            else:
                parts.append(_operand(operand, _NOT))
            last = operand
        else:
            parts.append(_operand(operand, _NOT))
            last = None
    return parts
