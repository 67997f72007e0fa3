"""A load with a value for each query and key, `bias[b, h, q_idx, kv_idx]`, as tiles that TMA copies.

Element by element it is a load of 2 or 4 bytes in the middle of the softmax, eight rows of 8 bytes for a
warp. As a tile beside each tile of keys it comes ahead of its turn, in boxes of 128 bytes a row; and as its
rows and columns are those of the scores, a warp reads 16-bit values by ldmatrix as its scores lie.
"""

from __future__ import annotations

from collections.abc import Collection

from attnc.expr.nodes import Expr, Index, Load, walk
from attnc.model.tensors import DType
from attnc.plan.loads import axes_of
from attnc.plan.width import is_wide

#: Tiles in shared memory, the most first: one can be copied while the one before is read.
PAIR_STAGES = (2, 1)
#: Axes in front of the last two that a box has room for.
_MOST_AXES = 2
_LAST = (Index("q_idx"), Index("kv_idx"))


def pair_of(score: Expr, mask: Expr, dtypes: dict[str, DType]) -> Load | None:
    """The first such load of the score that the mask does not read too; None if there is none."""
    asked: Collection[Expr] = frozenset(walk(mask))
    for node in walk(score):
        if isinstance(node, Load) and node not in asked and is_pair(node) and dtypes[node.tensor].is_float:
            return node
    return None


def is_pair(load: Load) -> bool:
    """Whether a tile of queries and keys is a box of the tensor: its last axes are theirs, and the others
    are the same for all of the tile. What lies outside of the tensor is 0 in boxes as in loads.
    """
    others = load.indices[:-2]
    if load.indices[-2:] != _LAST or len(others) > _MOST_AXES:
        return False
    return all(
        not axes_of(index) and not is_wide(index) and not any(isinstance(node, Load) for node in walk(index))
        for index in others
    )
