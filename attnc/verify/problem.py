"""A case made concrete: tensors in guarded buffers, in the layouts that the case asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnc.expr.nodes import Compare, Expr, Load, walk
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.tensors import Role, Tensor
from attnc.reference import Array, Floats
from attnc.support.arguments import DTYPES
from attnc.verify.case import Case, TensorLayout
from attnc.verify.data import (
    DenseSizes,
    Rng,
    ascending,
    descending,
    draw_counts,
    draw_ids,
    draw_integers,
    draw_lists,
    draw_qkv,
    draw_words,
    farthest,
    generator,
    restyle,
)
from attnc.verify.inputs_read import find_counts, find_slopes, find_words, lists
from attnc.verify.memory import reserve_zeros
from attnc.verify.storage import (
    LENGTHS,
    SMALL,
    WHOLE,
    Lengths,
    convert,
    draw_lengths,
    draw_table,
    fill_pool,
    kv_lengths,
    memory_dims,
    pack,
    unused_of,
    unused_value,
)
from attnc.verify.strategies import all_dims, size

#: What surrounds the tensors: of a float, an int and a bool type. Results must not depend on it.
FILLS: Mapping[str, tuple[float, int, bool]] = {
    "nan": (float("nan"), -(2**31), True),
    "zero": (0.0, 0, False),
    "large": (1e30, 2**31 - 1, True),
}
_GUARD = 64
#: Elements of a buffer up to which it is filled and compared.
_KEPT = 1 << 24
#: Bytes of a line of memory, between places that are tried for tensors that span gigabytes (less than between
#: two of their rows), and behind the first of them.
_LINE, _APART, _ROOM = 64, 1_000_448, 1 << 24
Value: TypeAlias = torch.Tensor | float | int | bool
Lines: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Guarded:
    """A tensor inside a larger buffer, and the buffer as it was; None where it is too large to keep."""

    name: str
    view: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor | None

    def is_disturbed(self, *, is_output: bool) -> bool:
        """Returns whether anything changed that should not: an input, or what surrounds an output."""
        if self.before is None:
            return False
        now = self.buffer.clone()
        if is_output:
            _restride(now, self.view).copy_(_restride(self.before, self.view))
        return not torch.equal(_bytes(now), _bytes(self.before))


@dataclass(frozen=True, slots=True)
class Problem:
    """Inputs by name in declaration order, outputs to write to, and the memory of both."""

    inputs: Mapping[str, Value]
    outputs: Mapping[str, torch.Tensor]
    guarded: tuple[Guarded, ...]
    arena: Arena | None = None

    def find_disturbed(self) -> str | None:
        """Returns the name of an input that was modified, or of a tensor whose guard was; None if there is
        none.
        """
        for tensor in self.guarded:
            if tensor.is_disturbed(is_output=tensor.name in self.outputs):
                return tensor.name
        return None


def build(attention: Attention, case: Case, *, fill: str = "nan", device: str = "cpu") -> Problem:
    """Returns the tensors of a case; the same for every fill, except outside the tensors."""
    chosen = all_dims(attention, case.dims)
    lengths = draw_lengths(attention, chosen, case.seed, case.lengths)
    dims = memory_dims(attention, chosen, lengths)
    values = draw_values(attention, case, dims, lengths, fill)
    inputs: dict[str, Value] = {}
    guarded, arena = [], Arena()
    for tensor in attention.inputs:
        if tensor.storage.is_part:
            continue
        value = values[tensor.name]
        data = convert(torch.from_numpy(np.array(value)), DType(tensor.dtype))
        if not tensor.shape and case.seed % 2:  # floats as they are drawn, integers as their type holds them
            inputs[tensor.name] = value.item() if data.is_floating_point() else data.item()
            continue
        made = place_tensor(tensor, data, case.layouts.get(tensor.name), fill, device, arena)
        inputs[tensor.name] = made.view
        guarded.append(made)
    outputs = {}
    for tensor in attention.outputs:
        shape = [size(expr, dims) for expr in tensor.shape]
        data = torch.full(shape, torch.nan, dtype=DTYPES[tensor.dtype])
        made = place_tensor(tensor, data, case.layouts.get(tensor.name), fill, device, arena)
        outputs[tensor.name] = made.view
        guarded.append(made)
    return Problem(inputs, outputs, tuple(guarded), arena)


class Arena:
    """Memory of tensors that span gigabytes. Those that use little of them lie in the same gigabytes, each
    where it meets none of those before. A CPU makes only pages that are touched, so there each has its own.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used: Lines = np.empty(0, np.int64)

    def take(
        self, shape: Sequence[int], strides: Sequence[int], start: int, dtype: torch.dtype, device: str
    ) -> torch.Tensor:
        """Returns a buffer of any content, whose changes autograd counts by itself, for a view of this shape
        and these strides that begins at an element of it, with a guard behind.
        """
        spanned = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        size = (start + spanned + 1 + _GUARD) * dtype.itemsize
        if device == "cpu":
            return torch.frombuffer(reserve_zeros(size), dtype=dtype)
        if 2 * prod(shape) > spanned:
            return torch.empty(size, dtype=torch.uint8, device=device).view(dtype)
        lines = _lines_of(shape, strides, start, dtype.itemsize)
        for at in range(0, self._memory.numel() - size + 1, _APART):
            if not np.isin(lines + at // _LINE, self._used, kind="sort").any():
                break
        else:
            self._memory, self._used = torch.empty(size + _ROOM, dtype=torch.uint8, device=device), lines[:0]
            at = 0
        self._used = np.concatenate([self._used, lines + at // _LINE])
        return self._memory[at : at + size].view(dtype).data


def _lines_of(shape: Sequence[int], strides: Sequence[int], start: int, itemsize: int) -> Lines:
    places = np.full((1,) * len(shape), start, np.int64)
    for axis, (length, stride) in enumerate(zip(shape, strides, strict=True)):
        across = (-1,) + (1,) * (len(shape) - axis - 1)
        places = places + stride * np.arange(length).reshape(across)
    return np.unique(places * itemsize // _LINE)


def place_tensor(
    tensor: Tensor,
    data: torch.Tensor,
    layout: TensorLayout | None,
    fill: str,
    device: str,
    arena: Arena | None = None,
) -> Guarded:
    """Returns the data in a buffer with guards, strided as the layout says; without elements it has no
    address, as tensors have that PyTorch allocates. arena: for a buffer of gigabytes, in place of its own.
    """
    layout = layout or TensorLayout(order=tuple(range(data.dim())), gaps=(0,) * data.dim())
    strides, reach = [0] * data.dim(), layout.step
    for axis in reversed(layout.order):
        if axis not in layout.expanded:
            strides[axis] = reach + (layout.more if axis == layout.order[0] else 0)
            reach = strides[axis] * (data.shape[axis] + layout.gaps[axis])
    if not data.numel():
        nothing = torch.empty(0, dtype=data.dtype, device=device)
        return Guarded(tensor.name, nothing.as_strided(data.shape, strides), nothing, nothing.clone())
    start = _GUARD + layout.offset
    count = start + reach + _GUARD
    if count > _KEPT:
        buffer = (arena or Arena()).take(data.shape, strides, start, data.dtype, device)
    else:
        buffer = _fill(count, data.dtype, fill, device)
    start += int(buffer.storage_offset())
    view, shape = buffer.as_strided(data.shape, strides, start), data.shape
    for axis in layout.expanded:
        length = min(1, shape[axis])
        data, view = data.narrow(axis, 0, length), view.narrow(axis, 0, length)
    view.copy_(data)
    before = None if count > _KEPT else buffer.clone()
    return Guarded(tensor.name, buffer.as_strided(shape, strides, start), buffer, before)


def _fill(count: int, dtype: torch.dtype, fill: str, device: str) -> torch.Tensor:
    as_float, as_int, as_bool = FILLS[fill]
    filler = as_float if dtype.is_floating_point else as_bool if dtype == torch.bool else as_int
    if dtype == torch.uint8:
        filler = 255 if as_int else 0
    if dtype in SMALL:
        filler = unused_of(SMALL[dtype], fill)
    return torch.full((count,), filler, dtype=dtype, device=device)


def _restride(buffer: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    return buffer.as_strided(view.shape, view.stride(), view.storage_offset())


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.uint8)


#: Of the tensors of exponents of two, how many are of scales near 1.
_NEAR_ONE = 0.75
#: Elements of a tensor that NumPy refuses in words of its own.
_TOO_MANY = 1 << 60


def draw_values(
    attention: Attention, case: Case, dims: Mapping[str, int], lengths: Lengths, fill: str
) -> dict[str, Array]:
    """Returns every input as a dense array: q, k, v in the case's styles, the rest by what the spec does with
    it.

    `fill` is what memory holds that no sequence uses: in pages, behind them, and in block tables. Raises
    MemoryError.
    """
    at = _sizes(attention, case, dims)
    for elements in (at.B * at.M * at.H * at.D, at.B * at.N * at.Hkv * max(at.D, at.Dv)):
        if elements >= _TOO_MANY:
            raise MemoryError(f"{elements} elements")
    values = draw_extras(attention, case, dims, lengths, at)
    styles = {"logits": case.logits, "values": case.values, "special": case.special}
    canonical = draw_qkv(at, dtype=attention.element, seed=case.seed, **styles)
    canonical["k"] = canonical["k"][..., : size(attention.k.shape[-1], dims)]  # others are of another input
    for tensor, others in ((attention.k, ("q",)), (attention.v, ())):
        if DType(tensor.dtype).is_narrow_integer and not tensor.storage.is_part:
            canonical[tensor.name] *= WHOLE
            for other in others:
                canonical[other] /= WHOLE
    if attention.k.storage.is_paged:
        canonical |= _in_pages(attention, case, dims, canonical, values, fill)
    for tensor in (attention.q, attention.k, attention.v):
        if tensor.storage.is_part:
            continue  # its rows are those of k, whatever those are stored as
        rows, array = (Role.QUERY if tensor is attention.q else Role.KEY), canonical[tensor.name]
        if ends := tensor.storage.ends:
            known = lengths.rows[ends]
            array = pack(array, known, lengths.tail, unused_value(tensor, fill))[None]
        order = (Role.BATCH, rows, Role.HEAD, Role.FEATURE)
        source = [order.index(role) for role in tensor.roles]
        missing = tuple({0, 1, 2, 3} - set(source))
        array = array.squeeze(axis=missing) if missing else array
        values[tensor.name] = array.transpose(np.argsort(np.argsort(source)))
    return values


def _sizes(attention: Attention, case: Case, dims: Mapping[str, int]) -> DenseSizes:
    return DenseSizes(
        B=dims["B"] if attention.q.storage.is_packed else _axis(attention.q, Role.BATCH, dims),
        M=longest(attention.q, case.dims, dims),
        N=longest(attention.k, case.dims, dims),
        H=_axis(attention.q, Role.HEAD, dims),
        Hkv=_axis(attention.k, Role.HEAD, dims),
        D=_axis(attention.q, Role.FEATURE, dims),
        Dv=_axis(attention.v, Role.FEATURE, dims),
    )


def draw_extras(
    attention: Attention,
    case: Case,
    dims: Mapping[str, int],
    lengths: Lengths,
    at: DenseSizes | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Array]:
    """Returns the inputs other than q, k, v and block tables, or only those with these names."""
    at = at or _sizes(attention, case, dims)
    values: dict[str, Array] = {name: lengths.cumulative(name) for name in lengths.rows}
    for stream, tensor in enumerate(attention.extras, start=2):
        if tensor.name in values or (names is not None and tensor.name not in names):
            continue
        shape = tuple(size(expr, dims) for expr in tensor.shape)
        rng = generator(case.seed, stream)
        if _is_length(attention, tensor) and case.lengths != "drawn":
            array = LENGTHS[case.lengths](rng, prod(shape), case.dims.get("N", at.N)).reshape(shape)
        else:
            drawn = np.asarray(_draw_extra(attention, tensor, shape, at, dims, rng))
            array = restyle(attention, tensor, drawn, case.extras, rng)
        order = ascending if tensor.is_sorted else descending if tensor.is_descending else None
        values[tensor.name] = array if order is None else order(array, rng)
        is_drawn = _is_length(attention, tensor) and case.lengths == "drawn"
        if is_drawn and attention.k.storage.is_paged:  # a number for all sequences has one too
            values[tensor.name].reshape(-1)[:1] = case.dims["N"]
    return values


def _in_pages(
    attention: Attention,
    case: Case,
    dims: Mapping[str, int],
    canonical: Mapping[str, Floats],
    values: dict[str, Array],
    fill: str,
) -> dict[str, Floats]:
    page, name = attention.k.storage.rows_of_page, attention.k.storage.table
    keys = kv_lengths(attention, dims, values)
    columns = size(attention.tensor(name).shape[1], dims)
    values[name], count = draw_table(columns, page, keys, generator(case.seed, 1001), fill)
    return {
        tensor.name: fill_pool(
            canonical[tensor.name], values[name], keys, page, count, unused_value(tensor, fill)
        )
        for tensor in (attention.k, attention.v)
        if not tensor.storage.is_part
    }


def longest(tensor: Tensor, chosen: Mapping[str, int], dims: Mapping[str, int]) -> int:
    """Returns how many rows the longest sequence has; keys that are packed like the queries have as many as
    those.
    """
    role = Role.KEY if Role.KEY in tensor.roles else Role.QUERY
    if not tensor.storage.is_packed:
        return _axis(tensor, role, dims)
    return chosen["N"] if role is Role.KEY and "N" in chosen else chosen["M"]


def _is_length(attention: Attention, tensor: Tensor) -> bool:
    return any(tensor.name in _names(expr) for expr in attention.lengths.values())


def _axis(tensor: Tensor, role: Role, dims: Mapping[str, int]) -> int:
    axis = tensor.axis(role)
    return 1 if axis is None else size(tensor.shape[axis], dims)


def _draw_extra(
    attention: Attention,
    tensor: Tensor,
    shape: tuple[int, ...],
    at: DenseSizes,
    dims: Mapping[str, int],
    rng: Rng,
) -> Array:
    softmax = attention.softmax
    if any(tensor.name in _names(expr) for expr in attention.lengths.values()):
        return draw_counts(rng, shape, at.N)
    if (listed := lists(attention).get(tensor.name)) is not None:
        return draw_lists(rng, shape, -(-at.N // listed.keys), distinct=tensor.is_distinct)
    if (counted := find_counts(attention).get(tensor.name)) is not None:
        return draw_counts(rng, shape, size(counted.extents[-1], dims))
    match DType(tensor.dtype):
        case DType.BOOL:
            return rng.random(shape) < 0.7
        case DType.U8 | DType.I32 | DType.I64 as dtype if tensor.name in find_words(attention):
            return draw_words(rng, shape, dtype)
        case DType.U8 if _is_exponent(attention, tensor.name) and rng.random() < _NEAR_ONE:
            return rng.integers(121, 134, shape)  # 127 is 1
        case DType.U8:
            return draw_integers(rng, shape, at) % 256
        case DType.I32 | DType.I64:
            if softmax.seed is not None and tensor.name in _names(softmax.seed):
                return rng.integers(-(2**62), 2**62, shape)
            if _is_id(attention.mask, tensor.name):
                return draw_ids(rng, shape)
            wide = {extra.name for extra in attention.extras if extra.dtype is DType.I64}
            far = farthest(attention.expressions, wide) if tensor.name in wide else 0
            return draw_integers(rng, shape, at, far=far)
        case _ if softmax.dropout is not None and tensor.name in _names(softmax.dropout):
            return rng.choice([0.0, 0.1, 0.5, 0.9], shape)
        case _ if tensor.name in find_slopes(attention):  # small, so that the mask is wider than a key
            return 2.0 ** -rng.uniform(1, 8, shape)
        case _:
            return rng.standard_normal(shape) + (1.5 if not shape else 0.0)


def _names(expr: Expr) -> set[str]:
    return {node.tensor for node in walk(expr) if isinstance(node, Load)}


def _is_exponent(attention: Attention, name: str) -> bool:
    """Returns whether bytes are scales of columns, as powers of two: most others leave no key or value that
    differs from zero, and hide what a kernel does.
    """
    return any(name in _names(scale) for scale in attention.column_scales.values())


def _is_id(mask: Expr, name: str) -> bool:
    compared = (node for node in walk(mask) if isinstance(node, Compare))
    return any(name in _names(node.left) and name in _names(node.right) for node in compared)
