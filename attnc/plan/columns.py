"""Columns of q, k and v, and of the tiles that hold them."""

from __future__ import annotations

from attnc.expr.nodes import Const
from attnc.model.tensors import Role, Tensor


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
