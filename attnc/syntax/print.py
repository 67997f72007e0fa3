"""Expressions -> one line of canonical text, with the fewest brackets that keep the tree, and one exception:
an `and` inside an `or` is bracketed, because few readers remember which binds tighter.

Also used for messages and for the comments of generated code that quote the spec.
"""

from __future__ import annotations

from collections.abc import Iterable

from attnc.syntax import ast

_OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _SIGN, _ATOM = range(8)


def print_expr(expr: ast.Expr) -> str:
    """`(a or b) and q_pos - W < kv_idx`"""
    return _print(expr, _OR)


def print_parts(expr: ast.Expr) -> tuple[str, ...]:
    """An expression cut at its loosest operator, each part to get a line: `a`, `and b`, `and c`."""
    match expr:
        case ast.BoolOp(op=op, operands=(first, *rest)):
            level = _level(expr) + 1 + (op == "or")
            return (_print(first, level), *(f"{op} {_print(operand, level)}" for operand in rest))
        case ast.Compare(operands=(first, *rest), ops=ops):
            pairs = zip(ops, rest, strict=True)
            return (_print(first, _SUM), *(f"{op} {_print(operand, _SUM)}" for op, operand in pairs))
        case ast.BinaryOp(op=op, left=left, right=right):
            level = _level(expr)
            head = print_parts(left) if _level(left) == level else (_print(left, level),)
            return (*head, f"{op} {_print(right, level + 1)}")
        case _:
            return (print_expr(expr),)


def print_arguments(call: ast.Call) -> tuple[str, ...]:
    """`block_table`, `page = 16`"""
    named = (f"{keyword.name.id} = {print_expr(keyword.value)}" for keyword in call.kwargs)
    return (*map(print_expr, call.args), *named)


def print_list(exprs: Iterable[ast.Expr]) -> str:
    """`a, b + 1`"""
    return ", ".join(map(print_expr, exprs))


def _print(expr: ast.Expr, at_least: int) -> str:
    """In brackets if the expression binds looser than its place asks for."""
    text = _bare(expr)
    return text if _level(expr) >= at_least else f"({text})"


def _bare(expr: ast.Expr) -> str:
    match expr:
        case ast.Name():
            return expr.id
        case ast.Number():
            return expr.text
        case ast.Bool():
            return "true" if expr.value else "false"
        case ast.UnaryOp():
            return f"{expr.op}{_print(expr.operand, _ATOM)}"
        case ast.Not():
            return f"not {_print(expr.operand, _NOT)}"
        case ast.BinaryOp() | ast.Compare() | ast.BoolOp():
            return " ".join(print_parts(expr))
        case ast.Call():
            return f"{expr.function.id}({', '.join(print_arguments(expr))})"
        case ast.Subscript():
            return f"{expr.tensor.id}[{print_list(expr.indices)}]"
        case ast.ListValue():
            return f"[{print_list(expr.items)}]"


def _level(expr: ast.Expr) -> int:
    match expr:
        case ast.BoolOp():
            return _OR if expr.op == "or" else _AND
        case ast.Not():
            return _NOT
        case ast.Compare():
            return _COMPARE
        case ast.BinaryOp():
            return _SUM if expr.op in ("+", "-") else _PRODUCT
        case ast.UnaryOp():
            return _SIGN
        case _:
            return _ATOM
