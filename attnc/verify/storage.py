"""Cases in pages and in packed sequences: lengths, block tables and pools that have broken serving engines.

Every sequence has a length of its own, the first the case's. Pages are permuted, some are shared by sequences
with a common beginning, some belong to no sequence; table entries past the end of a sequence are garbage, as
are rows past the end in its last page and rows that follow the last packed sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Dim, Load, walk
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.tensors import Paged, Ragged, Role, Tensor
from attnc.reference import Array, Floats
from attnc.support.arguments import DTYPES
from attnc.verify.data import Rng, generator

_STREAM = 1000
#: Integers that surround a table's entries must not be page numbers.
_NOWHERE = {"nan": -(2**31), "zero": 2**30, "large": 2**31 - 1}
#: Pages of a pool beside those that sequences have.
_SPARE_PAGES = 2
_UNUSED = {"nan": np.nan, "zero": 0.0, "large": 1e30}
#: The largest numbers of types that hold less than these, and such types of PyTorch.
LARGEST = {DType.F16: 6e4} | {dtype: dtype.largest for dtype in DType if dtype.is_narrow}
SMALL = {DTYPES[dtype]: dtype for dtype in LARGEST}
#: Units of the styles' numbers in integers: theirs are about 1.
WHOLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Rows of every sequence [B], by the name of the cumulative lengths that hold them."""

    rows: Mapping[str, Array]
    tail: int

    def cumulative(self, name: str) -> Array:
        return np.concatenate([[0], np.cumsum(self.rows[name])])

    def total(self, name: str) -> int:
        return int(self.rows[name].sum()) + self.tail


def draw_lengths(attention: Attention, dims: Mapping[str, int], seed: int, style: str) -> Lengths:
    """Lengths of packed sequences, in one of the LENGTHS; by default the first has M or N rows, others fewer,
    some none.
    """
    rng, rows = generator(seed, _STREAM), {}
    for tensor, longest in ((attention.q, "M"), (attention.k, "N")):
        match tensor.storage:
            case Ragged(cu_seqlens=name) if name not in rows:
                rows[name] = LENGTHS[style](rng, dims["B"], dims[longest]).clip(0, dims[longest])
    return Lengths(rows=rows, tail=int(rng.choice([0, 0, 3])))


def _some_lengths(rng: Rng, count: int, longest: int) -> Array:
    lengths = np.where(
        rng.random(count) < 0.5,
        rng.choice([0, min(1, longest), longest // 2, longest], count),
        rng.integers(0, longest + 1, count),
    )
    lengths[:1] = longest
    return lengths


def _full(rng: Rng, count: int, longest: int) -> Array:
    return np.full(count, longest)


def _mostly_empty(rng: Rng, count: int, longest: int) -> Array:
    lengths = np.zeros(count, dtype=np.int64)
    lengths[count // 2 : count // 2 + 1] = longest if count > 1 else 0
    return lengths


def _draw_one(rng: Rng, count: int, longest: int) -> Array:
    lengths = np.full(count, min(1, longest))
    lengths[-1:] = longest
    return lengths


def _around_tiles(rng: Rng, count: int, longest: int) -> Array:
    marks = [tiles + step for tiles in (16, 32, 64, 128, 256) for step in (-1, 0, 1)]
    lengths = rng.choice([mark for mark in marks if mark <= longest] or [longest], count)
    lengths[:1] = longest
    return lengths


def _beyond(rng: Rng, count: int, longest: int) -> Array:
    return np.asarray(rng.choice([longest + 1, longest + 7, 2 * longest + 64, -1], count))


#: How long sequences are, from (generator, how many, the most).
LENGTHS: Mapping[str, Callable[[Rng, int, int], Array]] = {
    "drawn": _some_lengths,
    "full": _full,
    "empty": _mostly_empty,
    "one": _draw_one,
    "tiles": _around_tiles,
    "beyond": _beyond,
}


def lengths_for(attention: Attention) -> tuple[str, ...]:
    """Returns the LENGTHS that make a difference to this attention."""
    stored = (attention.q.storage, attention.k.storage, attention.v.storage)
    if attention.lengths:
        return tuple(LENGTHS)
    if any(isinstance(storage, Ragged) for storage in stored):
        return tuple(style for style in LENGTHS if style != "beyond")
    return ("drawn",)


def memory_dims(attention: Attention, dims: Mapping[str, int], lengths: Lengths) -> dict[str, int]:
    """Returns the sizes that follow from storage: rows of packed tensors, columns of a block table, N in
    pages; and where a table finds scales of columns, or columns behind those of k, as many of their pages as
    there are of keys, in three of four cases: nothing is promised of a key whose scale is missing.
    """
    known = dict(dims)
    for tensor, role in ((attention.q, Role.QUERY), (attention.k, Role.KEY)):
        match tensor.storage:
            case Ragged(cu_seqlens=name):
                axis = tensor.size(role)
                assert isinstance(axis, Dim), "rows of all sequences are a size of their own"
                known[axis.name] = lengths.total(name)
            case Paged(block_table=name, page=page):
                columns = attention.tensor(name).shape[1]
                assert isinstance(columns, Dim), "columns of a block table are a size of their own"
                known[columns.name] = -(-dims["N"] // page) + lengths.tail // 2
                known["N"] = known[columns.name] * page
                for size in _find_beside(attention, name):
                    known[size] += (dims["B"] * known[columns.name] + _SPARE_PAGES) * (known[size] % 4 != 3)
    return known


def _find_beside(attention: Attention, table: str) -> set[str]:
    """Returns names of the sizes along which a block table finds what belongs to columns of keys."""
    loads = (node for expr in attention.column_reads for node in walk(expr) if isinstance(node, Load))
    pairs = (pair for load in loads for pair in zip(load.indices, load.extents, strict=True))
    return {
        extent.name
        for index, extent in pairs
        if isinstance(index, Load) and index.tensor == table and isinstance(extent, Dim)
    }


def kv_lengths(attention: Attention, dims: Mapping[str, int], tensors: Mapping[str, Array]) -> Array:
    """Returns N of every sequence [B], as the spec's `length` says."""
    found = []
    for b in range(dims["B"]):
        own = dict(dims)
        match attention.q.storage:
            case Ragged(cu_seqlens=name):
                own["M"] = int(tensors[name][b + 1] - tensors[name][b])
        env = Env(indices={"b": np.asarray(b)}, dims=own, tensors=tensors)
        found.append(int(evaluate(attention.lengths["N"], env).item()))
    return np.clip(np.array(found, dtype=np.int64), 0, dims["N"])


def draw_table(columns: int, page: int, keys: Array, rng: Rng, fill: str) -> tuple[Array, int]:
    """Returns a block table for sequences of `keys` keys, and the number of pages in the pool."""
    needed = -(-keys // page)
    count = int(needed.sum()) + _SPARE_PAGES
    free = rng.permutation(count)
    table = np.full((len(keys), columns), _NOWHERE[fill], dtype=np.int64)
    for b, n in enumerate(needed):
        table[b, :n], free = free[:n], free[n:]
        shared = min(n, needed[0]) // 2 if b and rng.random() < 0.5 else 0
        table[b, :shared] = table[0, :shared]
    return table, count


def fill_pool(rows: Floats, table: Array, keys: Array, page: int, count: int, unused: float) -> Floats:
    """Returns [pages, page, Hkv, D] with the first keys[b] rows of rows[b] [N, Hkv, D] where the table
    says.
    """
    pool = np.full((count, page, *rows.shape[2:]), unused)
    for b in reversed(range(len(keys))):  # pages that are shared hold what sequence 0 has there
        for column in range(-(-int(keys[b]) // page)):
            part = rows[b, column * page : min((column + 1) * page, int(keys[b]))]
            pool[table[b, column], : len(part)] = part
    return pool


def pack(rows: Floats, lengths: Array, tail: int, unused: float) -> Floats:
    """Returns [rows of all sequences, H, D] with the first lengths[b] rows of rows[b], then the tail."""
    parts = [rows[b, :n] for b, n in enumerate(lengths)]
    return np.concatenate([*parts, np.full((tail, *rows.shape[2:]), unused)])


def unused_value(tensor: Tensor, fill: str) -> float:
    """Returns the value of rows that no sequence has, as `stored` takes it."""
    return unused_of(DType(tensor.dtype), fill)


def unused_of(dtype: DType, fill: str) -> float:
    if dtype.is_narrow_integer and fill == "nan":
        return _instead_of_nan(dtype)
    return LARGEST.get(dtype, _UNUSED[fill]) if fill == "large" else _UNUSED[fill]


def _instead_of_nan(dtype: DType) -> float:
    return max(dtype.facts.least, dtype.largest, key=abs)


def convert(given: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Returns numbers as a tensor of this type: rounded, and in 8 bits the largest for what is larger and
    finite. What has no infinities has NaN for them; for NaN integers have their own of the largest magnitude.
    """
    if dtype.is_narrow_integer:
        spoilt = given.nan_to_num(_instead_of_nan(dtype))
        given = spoilt.round().clamp(dtype.facts.least, dtype.largest)
    elif dtype.is_narrow:
        infinite = given if dtype.facts.has_infinity else given * torch.nan
        given = torch.where(given.isinf(), infinite, given.clamp(-LARGEST[dtype], LARGEST[dtype]))
    return given.to(DTYPES[dtype])


def alter(value: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns change(a copy), of the same type; numbers of 8 bits, which torch does not compute with, are
    float32 on the way.
    """
    dtype = SMALL.get(value.dtype)
    if dtype is None or not dtype.is_narrow:
        return change(value.detach().clone())
    return convert(change(value.float()), dtype)
