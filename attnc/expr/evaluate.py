"""What an expression means, element by element: the semantics in the docstring of `nodes`, over numpy arrays.

The reference and the brute-force tests are built on this file, so it stays direct: no rewriting, no bounds,
no short cuts. It shares nothing with the code that makes kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attnc.expr.nodes import (
    And,
    Attended,
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
    Ref,
    Search,
    Type,
)

Array: TypeAlias = npt.NDArray[Any]

_DTYPES: Mapping[Type, npt.DTypeLike] = {"bool": np.bool_, "int": np.int64, "float": np.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    """Values of the leaves. All arrays must broadcast together; integers may stand for arrays.

    indices: int64 coordinates by name (`b h q_idx kv_idx`, or `q_lo q_hi kv_lo kv_hi`); q_pos follows from
    q_idx, M and N. dims: sizes. tensors: inputs by name, of the rank that their loads have. dot: float64
    values of dot(q, k), or of the attention in an epilogue. names: values of Params and Refs.
    """

    indices: Mapping[str, Array | int] = field(default_factory=dict)
    dims: Mapping[str, Array | int] = field(default_factory=dict)
    tensors: Mapping[str, Array] = field(default_factory=dict)
    dot: Array | None = None
    names: Mapping[str, Array | bool | int | float] = field(default_factory=dict)


def evaluate(expr: Expr, env: Env) -> Array:
    """Returns the values of `expr`: bool, int64 or float64, in the broadcast shape of the leaves that it
    uses.

    Raises KeyError for a leaf that `env` lacks. Overflow and invalid operations give inf and NaN silently.
    """
    with np.errstate(all="ignore"):
        return np.asarray(_value(expr, env), dtype=_DTYPES[expr.type])


def _value(expr: Expr, env: Env) -> Array:
    match expr:
        case Const(value=value):
            return np.asarray(value, dtype=_DTYPES[expr.type])
        case Index(name="q_pos") if "q_pos" not in env.indices:
            position = np.asarray(env.indices["q_idx"], np.int64) + env.dims["N"] - env.dims["M"]
            return np.asarray(position, np.int64)
        case Index(name=name):
            return np.asarray(env.indices[name], np.int64)
        case Dim(name=name):
            return np.asarray(env.dims[name], np.int64)
        case Param(name=name) | Ref(name=name):
            return np.asarray(env.names[name], _DTYPES[expr.type])
        case Dot() | Attended():
            if env.dot is None:
                raise KeyError("dot")
            return np.asarray(env.dot, np.float64)
        case Load():
            return _load(expr, env)
        case Search():
            return _search(expr, env)
        case InList():
            return _evaluate_list(expr, env)
        case Neg(operand=operand):
            return -_value(operand, env)
        case Not(operand=operand):
            return ~_value(operand, env)
        case Binary():
            return _binary(expr, env)
        case Compare():
            return _compare(expr, env)
        case And(operands=operands):
            return reduce(np.logical_and, (_value(operand, env) for operand in operands))
        case Or(operands=operands):
            return reduce(np.logical_or, (_value(operand, env) for operand in operands))
        case Call(function=function, args=args):
            return np.asarray(_call(function, [_value(arg, env) for arg in args]), _DTYPES[expr.type])


def _binary(expr: Binary, env: Env) -> Array:
    left, right = _value(expr.left, env), _value(expr.right, env)
    if expr.type == "float":
        left, right = left.astype(np.float64), right.astype(np.float64)
    match expr.op:
        case "+":
            return np.asarray(left + right)
        case "-":
            return np.asarray(left - right)
        case "*":
            return np.asarray(left * right)
        case "/":
            return np.asarray(left / right)
        case "//":
            return np.where(right == 0, 0, left // right)
        case "%":
            return np.where(right == 0, 0, left % right)


def _compare(expr: Compare, env: Env) -> Array:
    left, right = _value(expr.left, env), _value(expr.right, env)
    match expr.op:
        case "==":
            return np.asarray(left == right)
        case "!=":
            return np.asarray(left != right)
        case "<":
            return np.asarray(left < right)
        case "<=":
            return np.asarray(left <= right)
        case ">":
            return np.asarray(left > right)
        case ">=":
            return np.asarray(left >= right)


def _call(function: str, args: list[Array]) -> Array:
    match function:
        case "bit":
            word, place = args
            is_there = (place >= 0) & (place < 64)
            return np.asarray(is_there & (word >> np.where(is_there, place, 0) & 1 == 1))
        case "abs":
            return np.abs(args[0])
        case "min":
            return np.minimum(*args)
        case "max":
            return np.maximum(*args)
        case "where":
            return np.where(args[0], args[1], args[2])
        case _:
            return real(function, args[0].astype(np.float64))


def real(function: str, x: Array) -> Array:
    """Returns a function of real numbers, by the name that NumPy gives it."""
    match function:
        case "sigmoid":  # exp of what is negative does not overflow
            small = np.exp(-np.abs(x))
            return np.asarray(np.where(x >= 0, 1.0, small) / (1.0 + small))
        case "erf":
            return np.asarray(_ERF(x), np.float64)
        case _:
            return np.asarray(getattr(np, function)(x))


#: NumPy has no erf.
_ERF = np.frompyfunc(math.erf, 1, 1)


def _load(expr: Load, env: Env) -> Array:
    indices = [_value(index, env) for index in expr.indices]
    read = _read(env.tensors[expr.tensor], indices, expr.extents, env).astype(_DTYPES[expr.type])
    return read if expr.within is None else np.clip(read, *expr.within)


def _read(tensor: Array, indices: list[Array], extents: tuple[Expr, ...], env: Env) -> Array:
    inside: Array = np.asarray(True)
    clipped = []
    for index, extent, size in zip(indices, extents, tensor.shape, strict=True):
        inside = inside & (index >= 0) & (index < _value(extent, env)) & (index < size)
        clipped.append(np.clip(index, 0, max(size - 1, 0)))
    shape = np.broadcast_shapes(inside.shape, *(index.shape for index in clipped))
    if tensor.size == 0:
        return np.zeros(shape, tensor.dtype)
    return np.where(inside, tensor[tuple(np.broadcast_to(index, shape) for index in clipped)], 0)


def _search(expr: Search, env: Env) -> Array:
    """Counts the elements before `value`: on a sorted axis that is where a binary search ends."""
    before: Callable[[Array, Array], Array] = np.less if expr.side == "lower" else np.less_equal
    if expr.descends:
        before = np.greater if expr.side == "lower" else np.greater_equal
    prefix = [_value(index, env) for index in expr.prefix]
    value, extent = _value(expr.value, env), _value(expr.length, env)
    if extent.ndim == 0 and all(index.ndim == 0 for index in prefix):  # one row, all of it at once
        row = _read(env.tensors[expr.tensor], [*prefix, np.arange(int(extent))], expr.extents, env)
        return np.asarray(np.count_nonzero(before(row, value[..., None]), axis=-1), np.int64)
    count = np.zeros(np.broadcast_shapes(value.shape, extent.shape, *(i.shape for i in prefix)), np.int64)
    for position in range(int(extent.max(initial=0))):
        element = _read(env.tensors[expr.tensor], [*prefix, np.asarray(position)], expr.extents, env)
        count += (position < extent) & before(element, value)
    return count


def _evaluate_list(expr: InList, env: Env) -> Array:
    """Looks at every place of the list: nothing that it holds can do more than not be the entry."""
    tensor, prefix = env.tensors[expr.tensor], [_value(index, env) for index in expr.indices]
    entry = _value(expr.entry, env)
    inside: Array = np.asarray(True)
    for index, extent, size in zip(prefix, expr.extents, tensor.shape, strict=False):
        inside = inside & (index >= 0) & (index < _value(extent, env)) & (index < size)
    found: Array = np.asarray(False)
    for place in range(tensor.shape[-1]):
        here = _read(tensor, [*prefix, np.asarray(place)], expr.extents, env) == entry
        found = found | (here if expr.limit is None else here & (place < _value(expr.limit, env)))
    return np.asarray(inside & found)
