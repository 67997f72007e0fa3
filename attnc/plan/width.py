"""Which integers of a kernel need 64 bits: positions, lengths and sizes have 32, loaded values what their
tensor has.
"""

from __future__ import annotations

from attnc.expr.facts import larger, smaller
from attnc.expr.nodes import Binary, Const, Dim, Expr, Load, Ref, walk

#: Positions, lengths and sizes stay below 2^24: a factor from here on can carry products beyond 31 bits.
_LARGE = 1 << 7
_TILES = frozenset({"BLOCK_M", "BLOCK_N"})


def may_overflow(op: str, left: Expr, right: Expr) -> bool:
    """Whether an integer operation on 32-bit operands has to be carried out in 64 bits.

    Positions come in 32 bits. Rounding to tiles (`x // size * size`) gives no more than x.
    """
    if left.type != "int" or right.type != "int":
        return False
    match op, left, right:
        case "*", Binary(op="//", right=size), factor if size == factor:
            return False
        case "*", Dim(name=name), _ if name in _TILES:
            return False
        case "*", _, Dim(name=name) if name in _TILES:
            return False
        case "*", Const(value=value), _:
            return abs(value) >= _LARGE
        case "*", _, Const(value=value):
            return abs(value) >= _LARGE
        case "*", _, _:
            return True
        case "+" | "-", _, _:
            return any(isinstance(side, Const) and abs(side.value) >= 1 << 30 for side in (left, right))
        case "//" | "%", _, _:
            return any(isinstance(side, Const) and _widens(side) for side in (left, right))
        case _:
            return False


def is_wide(expr: Expr) -> bool:
    """Whether a part of it is computed in 64 bits, or was loaded so."""
    return any(map(_widens, walk(expr)))


def _widens(node: Expr) -> bool:
    match node:
        case Load(wide=wide) | Ref(wide=wide):
            return wide
        case Const(value=value):
            return node.type == "int" and not -(1 << 31) <= value < 1 << 31
        case Binary(op=op, left=left, right=right):
            return may_overflow(op, left, right)
        case _:
            return False


def narrowed(value: Expr, length: Expr) -> Expr:
    """A bound of positions from 0 to `length`, brought into that range before it is kept in 32 bits."""
    return larger(smaller(value, length), Const(0)) if is_wide(value) else value
