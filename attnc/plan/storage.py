"""Storage adjectives as arguments: what tensor is passed for a q, k, v or o, and which sizes follow.

dense    row i of sequence b is row i of batch entry b.
ragged   the sequences follow each other; row i of sequence b is row cu_seqlens[b] + i.
paged    the tensor passed holds pages: its batch axis counts pages, its key axis the rows of a page, whatever
         the order of the axes. Declared as k: [B, N, Hkv, D], it is [pages, page, Hkv, D]; declared as
         [B, Hkv, N, D], it is [pages, Hkv, page, D]. Row j of sequence b is row j % page of page
         block_table[b, j // page]; N is the number of table columns times the page size.
prefix   v is the first columns of k: no argument, no memory of its own.

Every stride is free but that of the features, so any view of a cache that an engine hands over will do.
"""

from __future__ import annotations

from dataclasses import replace

from attnc.expr.nodes import Binary, Const, Dim, Expr
from attnc.model.attention import Attention
from attnc.model.tensors import DType, Paged, Prefix, Role, Tensor
from attnc.plan.ir import Let
from attnc.plan.ir.decode import Part


def feature(tensor: Tensor) -> int:
    """D of q or k, Dv of v or o: a constant in a variant."""
    axis = tensor.axis(Role.FEATURE)
    size = None if axis is None else tensor.shape[axis]
    if not (isinstance(size, Const) and isinstance(size.value, int)):
        raise ValueError(f"the feature axis of {tensor.name} is not a constant: {size}")
    return size.value


def block(size: int) -> int:
    """Columns of a Triton tile that holds so many: a power of two, and the 16 that a dot needs at least."""
    return max(16, 1 << (size - 1).bit_length())


def are_wide(d: int, dv: int) -> bool:
    """Whether the accumulators of dk and dv cannot share a kernel: then each gets its own, at the price of
    one more dot (on an H200 1.3 to 1.5 times faster at 256 columns than small tiles).
    """
    return d + dv > 256


PAGES = Dim("pages")


def memory(tensor: Tensor) -> Tensor | None:
    """The tensor as it is passed, None for one that has no memory of its own."""
    match tensor.storage:
        case Prefix():
            return None
        case Paged(page=page):
            size: dict[Role, Expr] = {Role.BATCH: PAGES, Role.KEY: Const(page)}
            pairs = zip(tensor.roles, tensor.shape, strict=True)
            return replace(tensor, shape=tuple(size.get(role, axis) for role, axis in pairs))
        case _:
            return tensor


def is_plain(attention: Attention) -> bool:
    """Whether q, k and v are ordinary tensors, whose sequences all have M and N rows of memory."""
    return all(t.storage.is_plain for t in (attention.q, attention.k, attention.v))


def has_descriptors(attention: Attention) -> bool:
    """Whether tiles of q, k and v may come through tensor descriptors: of ordinary tensors, but for wide f32.

    Of f32, tensor cores multiply tiles in two parts. What a descriptor brought Triton parts in registers,
    which then spill at 128 columns; what pointers brought it parts in shared memory, where `wgmma` reads it
    (on an H200 the forward is 1.2 times as fast so; at 64 columns descriptors are 1.1 times as fast).
    """
    is_wide = max(block(feature(tensor)) for tensor in (attention.q, attention.v)) > 64
    return is_plain(attention) and not (DType(attention.q.dtype) is DType.F32 and is_wide)


def has_rows(attention: Attention) -> bool:
    """Whether q, k and v are ordinary or packed tensors, whose rows can have gradients."""
    return all(t.storage.has_gradients for t in (attention.q, attention.k, attention.v))


def capacity(attention: Attention) -> tuple[Let, ...]:
    """Sizes that the host computes from the others: N of paged keys."""
    match attention.k.storage:
        case Paged(block_table=table, page=page):
            columns = attention.tensor(table).shape[1]
            return (Let(name="N", value=Binary("*", columns, Const(page))),)
        case _:
            return ()


def longest(attention: Attention, role: Role) -> Expr:
    """The most rows that a sequence can have: M or N, or all rows of a ragged tensor."""
    tensor = attention.q if role is Role.QUERY else attention.k
    return tensor.size(role) if tensor.storage.is_packed else Dim("M" if role is Role.QUERY else "N")


def parts(attention: Attention) -> tuple[Part, ...]:
    """One part, unless v is a prefix of k that ends at a power of two: then its columns are a part."""
    d, dv = feature(attention.k), feature(attention.v)
    rest = d - dv
    is_tile = attention.v.storage.is_part and dv >= 16 and dv & (dv - 1) == 0
    if is_tile and rest >= 16 and rest & (rest - 1) == 0:
        return (Part(first=0, width=dv), Part(first=dv, width=rest))
    return (Part(first=0, width=d),)


def tile_columns(attention: Attention) -> int:
    """Of a tile of q or k, in all parts."""
    return sum(block(part.width) for part in parts(attention))
