"""Latents whose keys one query selects: rows of do and q are one operand, since k is multiplied by both, and
its gradient is a sum over both. Triton would lay a sum out anew between two products that add to it, and let
eight warps compute products of 64 rows twice.
"""

from __future__ import annotations

from attnc.model.attention import Attention
from attnc.plan.ir.kernel import DotPart
from attnc.plan.lists import listing_of
from attnc.plan.signature import several_parts

#: Columns of a product, of whose sum 256 threads have few enough each.
_WIDEST = 128


def joined_parts(attention: Attention) -> tuple[DotPart, ...]:
    """Returns the parts of the columns of q and k in which a step takes rows of do and q as one operand; ()
    where it does not: v is no part of k, or ends inside of one, or o is of another type.
    """
    if not attention.v.storage.is_part or attention.o.dtype != attention.q.dtype:
        return ()
    return tuple(
        DotPart(first=first, width=min(_WIDEST, part.first + part.width - first))
        for part in several_parts(attention)
        for first in range(part.first, part.first + part.width, _WIDEST)
    )


def joins_rows(attention: Attention) -> bool:
    """Returns whether kernels that make dq and dk take rows of do and q as one operand."""
    listing = listing_of(attention)
    return listing is not None and listing.gathers and bool(joined_parts(attention))
