"""Tensors of a call as NumPy arrays: their sizes, and the rows of one sequence wherever they are stored.

For the reference, which shares nothing with the planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Dim, Expr, walk
from attnc.model.attention import Attention
from attnc.model.tensors import DType, Paged, Ragged, Role, Tensor

if TYPE_CHECKING:
    import torch

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Integers: TypeAlias = npt.NDArray[np.int64]
Input: TypeAlias = "Array | torch.Tensor | bool | int | float"


def to_arrays(attention: Attention, tensors: Mapping[str, Input]) -> dict[str, Array]:
    """Every input as a NumPy array: floats exactly in float64, the rest as they are.

    Numbers are rounded to the declared type first.
    """
    arrays: dict[str, Array] = {}
    for tensor in attention.inputs:
        if tensor.storage.is_part:
            continue
        value = tensors[tensor.name]
        if isinstance(value, bool | int | float):
            value = _rounded(value, DType(tensor.dtype))
        elif not isinstance(value, np.ndarray):
            value = value.detach().cpu()
            value = value.double().numpy() if value.is_floating_point() else value.numpy()
        if value.ndim != len(tensor.shape):
            raise ValueError(f"'{tensor.name}' has {value.ndim} axes, the spec declares {len(tensor.shape)}")
        arrays[tensor.name] = value.astype(np.float64) if value.dtype.kind == "f" else value
    return arrays


def _rounded(value: float, dtype: DType) -> Array:
    """A number as an array of this type; bf16, which NumPy lacks, in float32."""
    if dtype is DType.BF16 and np.isfinite(value):
        bits = np.asarray(value, np.float32).view(np.uint32)
        even = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return np.asarray(even & np.uint32(0xFFFF0000)).view(np.float32)
    types = {DType.F32: np.float32, DType.BF16: np.float32, DType.F16: np.float16, DType.BOOL: np.bool_}
    return np.asarray(value, dtype=types.get(dtype, np.int64))


def empty_outputs(attention: Attention, arrays: Mapping[str, Array]) -> dict[str, Floats]:
    """The outputs as if no row saw anything: 0, and -inf for lse."""
    dims = bind(attention, arrays)
    return {
        t.name: np.full([_size(e, dims) for e in t.shape], -np.inf if t.name == "lse" else 0.0)
        for t in attention.outputs
    }


def bind(attention: Attention, arrays: Mapping[str, Array]) -> dict[str, int]:
    """The value of every dimension, solved from the shapes; ValueError where two shapes disagree.

    A size that nothing determines (G when Hkv is 0, N of pages) is 1. B, M, N, H and Dv are always there.
    """
    equations = []
    for tensor in attention.inputs:
        if tensor.name not in arrays:
            continue
        paged = tensor.storage.is_paged
        roles = tensor.roles or (None,) * len(tensor.shape)
        for expr, size, role in zip(tensor.shape, arrays[tensor.name].shape, roles, strict=True):
            if not (paged and role in (Role.BATCH, Role.KEY)):
                equations.append((expr, size, tensor.name))
        if isinstance(tensor.storage, Paged):
            capacity_of = arrays[tensor.storage.block_table].shape[1] * tensor.storage.page
            equations.append((tensor.size(Role.KEY), capacity_of, tensor.name))
    dims: dict[str, int] = {}
    progress = True
    while progress:
        progress = False
        for expr, size, name in equations:
            unknown = {node.name for node in walk(expr) if isinstance(node, Dim)} - dims.keys()
            if len(unknown) == 1 and (value := _solve(expr, dims, unknown.copy().pop(), size)) is not None:
                dims[unknown.pop()] = value
                progress = True
            elif not unknown and _size(expr, dims) != size:
                raise ValueError(f"'{name}' has an axis of {size}; other inputs make it {_size(expr, dims)}")
    for node in (node for tensor in attention.inputs for expr in tensor.shape for node in walk(expr)):
        if isinstance(node, Dim):
            dims.setdefault(node.name, 1)
    for name, tensor, role in (
        ("B", attention.q, Role.BATCH),
        ("M", attention.q, Role.QUERY),
        ("N", attention.k, Role.KEY),
        ("H", attention.q, Role.HEAD),
        ("Hkv", attention.k, Role.HEAD),
        ("Dv", attention.o, Role.FEATURE),
    ):
        axis = tensor.axis(role)
        if name not in dims:
            dims[name] = 1 if axis is None else _size(tensor.shape[axis], dims)
    return dims


def _size(expr: Expr, dims: Mapping[str, int]) -> int:
    return int(evaluate(expr, Env(dims=dims)).item())


def _solve(expr: Expr, dims: Mapping[str, int], name: str, size: int) -> int | None:
    """The value of the one unknown of a shape, which is affine in it; None if every value fits."""
    at_zero, at_one = (_size(expr, {**dims, name: value}) for value in (0, 1))
    if at_one == at_zero:
        return None
    value, rest = divmod(size - at_zero, at_one - at_zero)
    if rest:
        raise ValueError(f"no {name} makes an axis of size {size}")
    return value


def capacity(k: Tensor, arrays: Mapping[str, Array], b: int) -> int:
    """The rows that memory has for the keys of sequence b, before a `length` shortens it."""
    match k.storage:
        case Paged(block_table=table, page=page):
            return int(arrays[table].shape[1]) * page
        case _:
            return len(rows(k, arrays, b))


def rows(tensor: Tensor, arrays: Mapping[str, Array], b: int, stop: int | None = None) -> Array:
    """Rows 0 .. stop - 1 (None: all) of sequence b of q, k, v or an output as [rows, heads, features].

    A view, except of pages; table entries of pages from `stop` on are not looked at. An axis that the tensor
    lacks has size 1.
    """
    array, roles = arrays[tensor.name], list(tensor.roles)
    match tensor.storage:
        case Paged(block_table=table, page=page):
            needed = arrays[table][b] if stop is None else arrays[table][b, : -(-stop // page)]
            pages = np.moveaxis(array, roles.index(Role.BATCH), 0)[needed.astype(np.int64)]
            roles.remove(Role.BATCH)
            at = roles.index(Role.KEY)
            array = np.moveaxis(pages, 0, at)
            array = array.reshape(*array.shape[:at], len(pages) * page, *array.shape[at + 2 :])
        case Ragged(cu_seqlens=ends):
            at = next(axis for axis, role in enumerate(roles) if role in (Role.QUERY, Role.KEY))
            start, stop = (int(end) for end in arrays[ends][b : b + 2])
            array = array[(slice(None),) * at + (slice(start, stop),)]
        case _:
            if Role.BATCH in roles:
                array = array[(slice(None),) * roles.index(Role.BATCH) + (b,)]
                roles.remove(Role.BATCH)
    wanted = (Role.KEY if Role.KEY in roles else Role.QUERY, Role.HEAD, Role.FEATURE)
    present = array.transpose([roles.index(role) for role in wanted if role in roles])
    return np.expand_dims(present, tuple(axis for axis, role in enumerate(wanted) if role not in roles))[
        :stop
    ]
