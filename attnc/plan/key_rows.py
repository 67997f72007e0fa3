"""Keys and values in pages, as kernels of gradients see them: as rows of ordinary tensors.

A backward reads each key for every tile of queries, and tiles of keys own what they sum. So pages are copied
to rows once, before its kernels, which are those of ordinary tensors with a `length N`, to the last letter;
and what they make of rows is summed by page behind them. A page that several sequences share gets the sum of
theirs, in the order of the table.
"""

from __future__ import annotations

from dataclasses import replace

from attnc.effort import memo_by_object
from attnc.expr.construct import ZERO, maximum, minimum
from attnc.expr.nodes import Binary, Const, Dim, Expr, Index, Load
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.tensors import Dense, Ragged, Tensor
from attnc.plan.ir.module import KeyRows
from attnc.plan.signature import arguments, normalise


@memo_by_object
def lay_in_rows(attention: Attention) -> Attention:
    """Returns the attention with keys and values in pages as ordinary tensors, those of 8 bits in the type of
    q; itself where none are.
    """
    if not attention.k.storage.is_paged:
        return attention

    def lay(tensor: Tensor) -> Tensor:
        if not tensor.storage.is_paged:
            return tensor
        is_narrow = DType(tensor.dtype).is_narrow
        return replace(tensor, storage=Dense(), dtype=attention.element if is_narrow else tensor.dtype)

    inputs = tuple(map(lay, attention.inputs))
    paged = {tensor.name for tensor in attention.inputs if tensor.storage.is_paged}
    rounded = (name for name in attention.grads if name in paged and name not in attention.f32_grads)
    return replace(attention, inputs=inputs, f32_grads=(*attention.f32_grads, *rounded))


def in_rows(variant: Variant) -> Variant:
    """Returns the variant as kernels of gradients see it."""
    return replace(variant, attention=lay_in_rows(variant.attention))


def plan_key_rows(variant: Variant) -> KeyRows:
    """Returns what kernels of gradients are given in the place of keys in pages, and how many there are of
    each sequence.
    """
    attention, seen = normalise(variant.attention), in_rows(variant)
    paged = [tensor.name for tensor in variant.attention.inputs if tensor.storage.is_paged]
    args = arguments(seen.attention)
    storage = attention.k.storage
    return KeyRows(
        variant=seen,
        args=args,
        rows=tuple(arg for arg in args if arg.tensor.name in paged),
        table=storage.table,
        page=storage.rows_of_page,
        length=_count_keys(attention),
        rounded=tuple(name for name in seen.attention.f32_grads if name not in attention.f32_grads),
    )


def _count_keys(attention: Attention) -> Expr:
    """Returns N of sequence b, of sizes and loads alone: M is that of the sequence where it has its own."""
    known: dict[Expr, Expr] = {}
    match attention.q.storage:
        case Ragged(cu_seqlens=ends):
            size = attention.tensor(ends).shape
            first, end = (
                Load(ends, (place,), size, "int") for place in (Index("b"), Binary("+", Index("b"), Const(1)))
            )
            known[Dim("M")] = Binary("-", end, first)
    for name, value in attention.lengths.items():
        found = substitute(value, known)
        if name == "N":
            return found
        known[Dim(name)] = maximum(minimum(found, Dim(name)), ZERO)
    raise ValueError("keys in pages without a length")
