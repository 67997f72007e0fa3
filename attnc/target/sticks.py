"""What the kernels of stick-breaking's gradients hand on: sums at the edges of tiles of keys.

With r_k = -log2(1 - sigmoid(s_k)), w_j = exp2(s_j - sum_{k >= j} r_k) and dp_j = do . v_j:

    ds_j = w_j dp_j - sigmoid(s_j) (dlse + sum_{k <= j} w_k dp_k)

A kernel over queries walks over the keys from the last to the first and writes the r of the keys behind each
tile (`behind`), then from the first to the last and writes the sum of w dp of those before it (`before`).
Both are f32, a number for each query and tile of keys; kernels over keys read them.
"""

from __future__ import annotations

from attnc.expr.nodes import show
from attnc.model.tensors import Role
from attnc.plan.ir import Module
from attnc.plan.signature import longest

#: Sums at the edges of tiles, by query: -log2 of what keys behind a tile leave; w dp of the keys before it.
BEHIND, BEFORE = "behind", "before"


def hands_on(module: Module) -> bool:
    """Returns whether a kernel over keys reads the sums before tiles."""
    kernels = module.backward_kernels.values()
    return any(not planned.over_q and planned.makes != ("dv",) for planned in kernels)


def count_edges(module: Module, config: str) -> str:
    """Returns how many tiles of keys there are, as text. config: of a kernel with such tiles."""
    return f"max(cdiv({show(longest(module.variant.attention, Role.KEY))}, {config}.BLOCK_N), 1)"
