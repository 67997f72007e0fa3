"""Expressions as functions of numpy arrays, made once for a mask and called for every plan: what
`expr.evaluate` says of many tiles, in few calls.

Values are arrays, or plain numbers where all tiles have the same; an index of the only sequence costs nothing
then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Binary, Call, Compare, Const, Dim, Expr, Index, Load, Neg, Ref, Search

#: An array, or a number.
Value: TypeAlias = Any
Function: TypeAlias = Callable[[Env], Value]

_OPERATORS: Mapping[str, Callable[[Value, Value], Value]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def function_of(expr: Expr) -> Function:
    """The values of `expr`, which broadcast with those of its leaves."""
    match expr:
        case Const(value=value):
            return lambda env: value
        case Index(name=name) if name != "q_pos":
            return lambda env: env.indices[name]
        case Dim(name=name):
            return lambda env: env.dims[name]
        case Ref(name=name):
            return lambda env: env.names[name]
        case Neg(operand=operand, type="int"):
            negated = function_of(operand)
            return lambda env: -negated(env)
        case Binary(op="+" | "-" | "*" as op, type="int") | Compare(op=op):
            return _applied(_OPERATORS[op], expr.left, expr.right)
        case Call(function="min" | "max" as function, type="int"):
            return _applied(least if function == "min" else most, *expr.args)
        case Load():
            return _load(expr)
        case Search():
            return _search(expr)
        case _:
            return lambda env: evaluate(expr, env)


def least(x: Value, y: Value) -> Value:
    """The smaller one, of numbers or element by element."""
    return (x if x <= y else y) if isinstance(x, int) and isinstance(y, int) else np.minimum(x, y)


def most(x: Value, y: Value) -> Value:
    """The larger one."""
    return (x if x >= y else y) if isinstance(x, int) and isinstance(y, int) else np.maximum(x, y)


def _applied(operation: Callable[[Value, Value], Value], left: Expr, right: Expr) -> Function:
    first, second = function_of(left), function_of(right)
    return lambda env: operation(first(env), second(env))


def _load(node: Load) -> Function:
    place = _place(node.indices, node.extents)

    def value(env: Env) -> Value:
        table = np.asarray(env.tensors[node.tensor])
        at, inside = place(table.shape, env)
        if not table.size or inside is False:
            return np.zeros(np.shape(at), table.dtype)
        read = table.reshape(-1).take(at, mode="clip")
        return read if inside is True else np.where(inside, read, 0)

    return value


def _search(node: Search) -> Function:
    """By bisection: the axis is sorted."""
    sought, extents = function_of(node.value), function_of(node.extents[-1])
    place = _place(node.prefix, node.extents[:-1])
    side: Literal["left", "right"] = "left" if node.side == "lower" else "right"

    def value(env: Env) -> Value:
        table = np.asarray(env.tensors[node.tensor])
        length = table.shape[-1]
        row, inside = place(table.shape[:-1], env)
        extent = least(most(extents(env), 0), length)
        if inside is not True:
            row = np.where(inside, row, -1)
        key = row * (length + 1) + extent  # a row of the table, and how much of it
        table, distinct, given = table.reshape(-1, length), _distinct(key), sought(env)
        if len(distinct) == 1:
            return _line(table, distinct[0]).searchsorted(given, side)
        given, key = np.broadcast_arrays(given, key)
        found = np.zeros(given.shape, np.int64)
        for one in distinct:
            same = key == one
            found[same] = _line(table, one).searchsorted(given[same], side)
        return found

    return value


def _line(table: Value, key: int) -> Value:
    row, end = divmod(key, table.shape[1] + 1)
    return table[row, :end] if row >= 0 else np.zeros(end, table.dtype)


def _place(indices: Sequence[Expr], extents: Sequence[Expr]) -> Callable[[tuple[int, ...], Env], Value]:
    """Which element of a tensor of some shape is read, and whether it is inside."""
    axes = [(function_of(index), function_of(extent)) for index, extent in zip(indices, extents, strict=True)]

    def place(shape: tuple[int, ...], env: Env) -> tuple[Value, Value]:
        at: Value = 0
        inside: Value = True
        for (index, extent), size in zip(axes, shape, strict=True):
            i, end = index(env), least(extent(env), size)
            if isinstance(i, int) and isinstance(end, int):
                within: Value = 0 <= i < end
            else:
                within = (i >= 0) & (i < end)
            inside = within if inside is True else inside & within
            at = at * size + i
        return at, inside

    return place


def _distinct(keys: Value) -> list[int]:
    if isinstance(keys, int):
        return [keys]
    first = keys.flat[0] if keys.size else 0
    return [int(first)] if (keys == first).all() else np.unique(keys).tolist()
