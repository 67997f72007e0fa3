"""Inputs of a spec as a rank's rows, keys and heads see them, and their gradients back to the whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnc.distributed.derive import View
from attnc.distributed.plan import Part


def view_of(
    view: View, part: Part, tables: Mapping[str, torch.Tensor], x: torch.Tensor, first: int, heads: int
) -> torch.Tensor:
    """The input as the derived spec reads it, with query heads first .. first + heads - 1. What lies outside
    of x is 0, as everywhere in the language.
    """
    for axis, kind in enumerate(view.kinds):
        match kind:
            case "heads":
                x = _narrowed(x, axis, first, heads)
            case "keys":
                x = _narrowed(x, axis, part.lo, part.hi - part.lo)
            case "rows" | "places":
                x = _selected(x, axis, tables[f"_{kind}"])
            case _:
                continue
    return x


def add_view(
    view: View,
    part: Part,
    tables: Mapping[str, torch.Tensor],
    total: torch.Tensor,
    gradient: torch.Tensor,
    first: int,
) -> None:
    """Adds the gradient of a view to that of the whole input, in f32."""
    gradient = gradient.float()
    for axis, kind in enumerate(view.kinds):
        size = gradient.shape[axis]
        start = {"heads": first, "keys": part.lo}.get(kind, 0)
        if kind in ("rows", "places"):
            continue
        inside = max(min(size, total.shape[axis] - start), 0)
        total = total.narrow(axis, min(start, total.shape[axis]), inside)
        gradient = gradient.narrow(axis, 0, inside)
    chosen = [axis for axis, kind in enumerate(view.kinds) if kind in ("rows", "places")]
    if not chosen:
        total.add_(gradient)
        return
    (axis,) = chosen  # a query has one position
    at = tables[f"_{view.kinds[axis]}"].long()
    kept = ((at >= 0) & (at < total.shape[axis])).nonzero().flatten()
    total.index_add_(axis, at[kept], gradient.index_select(axis, kept))


def _narrowed(x: torch.Tensor, axis: int, first: int, count: int) -> torch.Tensor:
    """These of the axis, zeros where it ends before."""
    size = x.shape[axis]
    inside = x.narrow(axis, min(first, size), max(min(count, size - first), 0))
    missing = count - inside.shape[axis]
    if not missing:
        return inside
    shape = [*x.shape[:axis], missing, *x.shape[axis + 1 :]]
    return torch.cat((inside, x.new_zeros(shape)), axis)


def _selected(x: torch.Tensor, axis: int, rows: torch.Tensor) -> torch.Tensor:
    """These of the axis, zeros where there are none."""
    size = x.shape[axis]
    if not size:
        return x.new_zeros([*x.shape[:axis], len(rows), *x.shape[axis + 1 :]])
    inside = (rows >= 0) & (rows < size)
    found = x.index_select(axis, rows.clamp(0, size - 1))
    shape = [1] * x.dim()
    shape[axis] = len(rows)
    return torch.where(inside.view(shape), found, torch.zeros((), dtype=x.dtype, device=x.device))
