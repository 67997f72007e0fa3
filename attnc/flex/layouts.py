"""How a result lies in memory: as its query does, by the rule of the installed torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch

#: The orders of the axes of o, outermost first. A kernel writes those that end with D; the contiguous one and
#: that of [B, M, H, D] come first.
_ORDERS = sorted(("".join(axes) for axes in permutations("BHMD")), key=lambda order: (order[3] != "D", order))
_AXES = "BHMD"
#: Whether the columns of a row follow each other in results of this torch, also of queries whose do not.
_KEEPS_ROWS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def order_like(shape: Sequence[int], query: torch.Tensor) -> str:
    """Returns the order of the axes of a result of this shape whose strides are ordered as the query's: those
    of axes of one element, and equal ones, included. Rows stay whole where this torch keeps them so.
    """
    *outer, width = query.stride()
    wanted = _fill_axes([*outer, 0 if width == 1 else width])  # before axes that are expanded
    if _KEEPS_ROWS and any(shape[axis] != 1 for axis in wanted[: wanted.index(3)]):
        wanted = [3, *(axis for axis in wanted if axis != 3)]
    for order in _ORDERS:
        if _fill_axes(_strides(shape, order)) == wanted:
            return order
    return "".join([_AXES[axis] for axis in reversed(wanted)])


def _strides(shape: Sequence[int], order: str) -> list[int]:
    strides, count = {}, 1
    for axis in reversed(order):
        strides[axis] = count
        count = count * shape[_AXES.index(axis)]
    return [strides[axis] for axis in _AXES]


def _fill_axes(strides: Sequence[int]) -> list[int]:
    found: list[int] = []
    for axis in range(4):
        place = 0
        while place < len(found) and strides[found[place]] < strides[axis]:
            place += 1
        found.insert(place, axis)
    return found


def laid_out(o: torch.Tensor, order: str) -> torch.Tensor:
    """Returns a result [B, H, M, D] with its axes in this order in memory: itself where it has it."""
    if order.endswith("D"):
        return o
    axes = [_AXES.index(axis) for axis in order]
    back = [order.index(axis) for axis in _AXES]
    return o.permute(axes).clone(memory_format=torch.contiguous_format).permute(back)


def as_logical(o: torch.Tensor, order: str) -> torch.Tensor:
    """Returns the output of a kernel, whose axes are those of `written_order`, as [B, H, M, D]."""
    axes = logical_axes(order)
    return o if axes is None else o.permute(axes)


def logical_axes(order: str) -> list[int] | None:
    """Returns where the axes [B, H, M, D] are of what a kernel wrote; None where they are in that order."""
    return _LOGICAL[order]


def as_written(o: torch.Tensor, order: str) -> torch.Tensor:
    """Returns a result [B, H, M, D] with the axes in the order that a kernel writes."""
    written = written_order(order)
    return o if written == "BHM" else o.permute([*("BHM".index(axis) for axis in written), 3])


def written_order(order: str) -> str:
    """Returns the order of B, H and M that a kernel writes."""
    return order.replace("D", "")


def _find_logical(written: str) -> list[int] | None:
    return None if written == "BHM" else [*(written.index(axis) for axis in "BHM"), 3]


#: By the order of the axes of o: every call asks.
_LOGICAL = {order: _find_logical(written_order(order)) for order in _ORDERS}
