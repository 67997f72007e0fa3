"""Keys and values that are converted to q's type before a kernel multiplies them, into memory of their own.

A prompt multiplies every key by thousands of rows, tile after tile of queries. Inside of the kernel, a key
is converted once for each of those tiles; before it, once, in one pass over K and V. The kernel that follows
is the one for 16 bits, to the last letter, and so are its bits. Where columns have scales, what is stored
times its scale is rounded once on the way, as `model.columns` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from math import gcd

from attnc.expr.nodes import Binary, Const, Dim, Expr, children, walk
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.tensors import Dense, Tensor
from attnc.plan.columns import plan_column_scales
from attnc.plan.ir import Fetch, statement_expressions
from attnc.plan.ir.kernel import TILE_COLUMN, ColumnScale
from attnc.plan.ir.module import Conversion, Converted
from attnc.plan.loads import LoadNames
from attnc.plan.signature import arguments, feature, normalise

#: Threads of a block, blocks for each multiprocessor, columns that a thread loads together, and the most that
#: it converts at a time.
CONVERT_THREADS, CONVERT_BLOCKS, CONVERT_CHUNK, COLUMNS_AT_ONCE = 256, 8, 8, 16
#: Columns of rows of which 2^32 take 768 GB. To divide a number of 64 bits takes much longer than one of 32.
FEWEST_COLUMNS_COUNTED = 64


def list_convertible(attention: Attention) -> list[Tensor]:
    """Lists k and v if their type is not that of q, or if their columns have scales; both if they are in
    pages, where they lie alike. Values that are columns of the keys are converted with the keys.
    """
    stored = [tensor for tensor in (attention.k, attention.v) if not tensor.storage.is_part]
    scales = attention.column_scales
    found = [tensor for tensor in stored if DType(tensor.dtype).is_narrow or tensor.name in scales]
    return stored if found and attention.k.storage.is_paged else found


def convert_variant(variant: Variant) -> Variant:
    """Returns the variant with k and v as a kernel sees them that comes behind the conversion: those in pages
    as rows that follow each other.
    """
    attention = variant.attention
    converted = {tensor.name for tensor in list_convertible(attention)}
    is_paged = attention.k.storage.is_paged

    def convert(tensor: Tensor) -> Tensor:
        if tensor.name not in (attention.k.name, attention.v.name):
            return tensor
        is_narrow = DType(tensor.dtype).is_narrow
        made = replace(tensor, dtype=attention.element) if is_narrow else tensor
        return replace(made, storage=Dense()) if is_paged and tensor.name in converted else made

    softmax = attention.softmax
    made = replace(
        attention,
        inputs=tuple(map(convert, attention.inputs)),
        k_scale=None,
        softmax=replace(softmax, v_scale=None) if softmax.scales_columns else softmax,
    )
    return replace(variant, attention=made)


def plan_conversion(variant: Variant) -> Conversion:
    """Returns the conversion of k and v of a variant before its kernel runs."""
    made = convert_variant(variant)
    stored, seen = ({arg.tensor.name: arg for arg in arguments(x.attention)} for x in (variant, made))
    attention = normalise(variant.attention)
    scales = {
        scale.tensor: scale for scale in plan_column_scales(attention, LoadNames.of(attention), packs=True)
    }
    tensors = [
        Converted(stored=stored[x.name], made=seen[x.name], scale=scales.get(x.name))
        for x in list_convertible(variant.attention)
    ]
    names, length = LoadNames.of(attention), attention.lengths.get("N")
    length = None if length is None else names.replace(length)
    return Conversion(
        variant=made,
        args=tuple(seen.values()),
        tensors=tuple(tensors),
        length=length,
        fetches=tuple(replace(fetch, row=None) for fetch in names.fetches),
    )


@dataclass(frozen=True, slots=True)
class ConvertedRows:
    """Tensors whose rows lie alike, and whose numbers are loaded together."""

    tensors: tuple[Converted, ...]

    @property
    def columns(self) -> int:
        return feature(self.tensors[0].stored.tensor)

    @property
    def at_once(self) -> int:
        return gcd(self.columns, COLUMNS_AT_ONCE)

    @property
    def is_counted_in_32_bits(self) -> bool:
        """Whether no memory has room for more rows: three bytes of each column."""
        return self.columns >= FEWEST_COLUMNS_COUNTED

    @property
    def chunks(self) -> int:
        return self.at_once // CONVERT_CHUNK

    @property
    def pieces(self) -> int:
        return self.columns // self.at_once


def group_rows(conversion: Conversion) -> list[ConvertedRows]:
    """Returns the tensors that are converted, neighbours whose rows lie alike together."""
    return [ConvertedRows(tuple(found)) for _, found in groupby(conversion.tensors, _lie_of_rows)]


def _lie_of_rows(converted: Converted) -> tuple[object, ...]:
    tensor = converted.stored.tensor
    storage, sizes = tensor.storage, tensor.shape[:-1]
    return feature(tensor), tensor.roles[:-1], sizes, storage.table, storage.rows_of_page


def list_sizes(value: Expr, fetches: Iterable[Fetch]) -> list[str]:
    """Lists the sizes of a call that a value and what it loads mention."""
    exprs = [value, *(x for fetch in fetches for x in statement_expressions(fetch))]
    return [node.name for expr in exprs for node in walk(expr) if isinstance(node, Dim)]


def count_alike(scale: ColumnScale) -> int:
    """Returns the largest known n such that columns n i to n i + n - 1 share a scale, for every i."""
    return count_alike_in(
        *(index for fetch in scale.fetches for index in (*fetch.load.indices, fetch.guard)), scale.value
    )


def count_alike_in(*read: Expr) -> int:
    """Returns the same for these expressions: n columns share their values. 0: all columns do."""
    return reduce(gcd, map(_count_alike, read), 0)


def _count_alike(expr: Expr) -> int:
    match expr:
        case Binary(op="//", left=left, right=Const(value=int() as size)) if left == TILE_COLUMN:
            return size
        case _ if expr == TILE_COLUMN:
            return 1
        case _:
            return count_alike_in(*children(expr))
