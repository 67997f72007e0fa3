"""Sizes as products: when two are equal, and when one divides another, whatever the dimensions are."""

from __future__ import annotations

from collections import Counter

from attnc.expr.nodes import Binary, Const, Dim, Expr, Param, walk


def is_static(size: Expr) -> bool:
    """Whether the size is known at compile time."""
    return not any(isinstance(node, Dim) for node in walk(size))


def same_size(left: Expr, right: Expr) -> bool:
    """Whether two sizes are equal whatever the dimensions are; products may be in any order."""
    return left == right or (_factors(left) is not None and _factors(left) == _factors(right))


def group_size(heads_q: Expr, heads_kv: Expr) -> Expr | None:
    """heads_q / heads_kv, when it is an integer whatever the dimensions are, else None."""
    q, kv = _factors(heads_q), _factors(heads_kv)
    if q is None or kv is None or q[0] % kv[0] or kv[1] - q[1]:
        return None
    made: Expr | None = Const(q[0] // kv[0]) if q[0] != kv[0] else None
    for factor in (q[1] - kv[1]).elements():
        made = factor if made is None else Binary("*", made, factor)
    return made or Const(1)


def _factors(size: Expr) -> tuple[int, Counter[Expr]] | None:
    """The integer factor and the names of a product; None for what is not a product of positive factors."""
    match size:
        case Const(value=int() as value) if value > 0:
            return value, Counter()
        case Dim() | Param():
            return 1, Counter({size: 1})
        case Binary(op="*", left=left, right=right):
            a, b = _factors(left), _factors(right)
            return (a[0] * b[0], a[1] + b[1]) if a and b else None
        case _:
            return None
