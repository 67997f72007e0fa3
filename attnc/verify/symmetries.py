"""Which symmetries an attention has, read off its expressions."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import Expr, Index, Load, children, uses, walk
from attnc.model.attention import Attention
from attnc.model.tensors import Tensor
from attnc.verify.strategies import free_dims


def is_dense(attention: Attention) -> bool:
    """q, k and v are ordinary tensors, so that an axis can be permuted or cut."""
    return all(tensor.storage.is_plain for tensor in (attention.q, attention.k, attention.v))


def has_values(attention: Attention) -> bool:
    """v has memory of its own."""
    return not attention.v.storage.is_part


def sized_axes(tensor: Tensor, extent: Expr) -> list[int]:
    """Axes of this size, in the words of the spec."""
    return [axis for axis, expr in enumerate(tensor.shape) if expr == extent]


def _expressions(attention: Attention) -> tuple[Expr, ...]:
    softmax = attention.softmax
    optional = (softmax.sink, softmax.dropout, softmax.seed, softmax.first_head)
    return (
        attention.score,
        attention.mask,
        *attention.lengths.values(),
        *(e for e in optional if e is not None),
    )


def _positions(expr: Expr) -> Iterator[str]:
    """Names of the indices that are used as numbers, not only to address a tensor."""
    if isinstance(expr, Index):
        yield expr.name
    if not isinstance(expr, Load):
        for child in children(expr):
            yield from _positions(child)


def only_addresses(attention: Attention, name: str, extent: Expr) -> bool:
    """The index only picks elements of axes of this size: permuting the axes permutes the outputs."""
    if attention.softmax.dropout is not None:
        return False
    for expr in _expressions(attention):
        if name in _positions(expr):
            return False
        for node in walk(expr):
            if isinstance(node, Load):
                for index, size_ in zip(node.indices, node.extents, strict=True):
                    if name in uses(index) and (index, size_) != (Index(name), extent):
                        return False
    return True


def ignores_key_order(attention: Attention) -> bool:
    asked = {name for expr in _expressions(attention) for name in uses(expr)}
    return "kv_idx" not in asked and attention.softmax.dropout is None and not attention.lengths


def is_grouped(attention: Attention) -> bool:
    extents = {expr for tensor in attention.extras for expr in tensor.shape}
    names = free_dims(attention)
    return "G" in names and "Hkv" in names and attention.heads_kv not in extents
