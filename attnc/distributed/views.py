"""Inputs of a spec as a rank's rows, keys and heads see them, their gradients back to the whole, and the
tables of positions that derived specs read (`derive.TABLES`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from attnc.distributed.derive import View
from attnc.distributed.plan import Part, Plan
from attnc.distributed.spans import Ints
from attnc.model.attention import Attention


def view_of(
    view: View, part: Part, tables: Mapping[str, torch.Tensor], x: torch.Tensor, first: int, heads: int
) -> torch.Tensor:
    """The input as the derived spec reads it, with query heads first .. first + heads - 1. What lies outside
    of x is 0, as everywhere in the language.
    """
    for axis, kind in enumerate(view.kinds):
        match kind:
            case "heads":
                x = _slice_padded(x, axis, first, heads)
            case "keys":
                x = _slice_padded(x, axis, part.lo, part.hi - part.lo)
            case "rows" | "places":
                x = _take_padded(x, axis, tables[f"_{kind}"])
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


def _slice_padded(x: torch.Tensor, axis: int, first: int, count: int) -> torch.Tensor:
    """Takes `count` elements of the axis from `first` on, zeros where it ends before."""
    size = x.shape[axis]
    inside = x.narrow(axis, min(first, size), max(min(count, size - first), 0))
    missing = count - inside.shape[axis]
    if not missing:
        return inside
    shape = [*x.shape[:axis], missing, *x.shape[axis + 1 :]]
    return torch.cat((inside, x.new_zeros(shape)), axis)


def _take_padded(x: torch.Tensor, axis: int, rows: torch.Tensor) -> torch.Tensor:
    """Takes these rows of the axis, zeros where there are none."""
    size = x.shape[axis]
    if not size:
        return x.new_zeros([*x.shape[:axis], len(rows), *x.shape[axis + 1 :]])
    inside = (rows >= 0) & (rows < size)
    found = x.index_select(axis, rows.clamp(0, size - 1))
    shape = [1] * x.dim()
    shape[axis] = len(rows)
    return torch.where(inside.view(shape), found, torch.zeros((), dtype=x.dtype, device=x.device))


def tables_of(
    plan: Plan, attention: Attention, rows: Ints, first_key: int, device: torch.device
) -> Mapping[str, torch.Tensor]:
    """Every table for these query rows, against keys from `first_key` on; `_rows` and `_places` are where
    views take their rows from.

    Raises ValueError for packed sequences with more queries than keys, whose rows are in no order.
    """
    sizes = plan.sizes
    numbers: dict[str, int] = {
        "key_first": first_key,
        "queries_all": sizes.queries,
        "keys_all": sizes.keys,
        "heads_all": sizes.heads,
        "kv_heads_all": sizes.kv_heads,
    }
    found: dict[str, Ints | int] = dict(numbers)
    if sizes.ends_q is None:
        places = rows if attention.lengths else rows + (sizes.keys - sizes.queries)
        found |= {"row_at": places - first_key, "_rows": rows, "_places": places}
    else:
        assert sizes.ends_k is not None, "keys are packed where queries are"
        b = np.searchsorted(sizes.ends_q, rows, "right") - 1
        queries, keys = np.diff(sizes.ends_q)[b], np.diff(sizes.ends_k)[b]
        if (queries > keys).any():
            raise ValueError("a packed sequence has more queries than keys, which ranks cannot share out")
        start = sizes.ends_k[b] - first_key
        place = start + (rows - sizes.ends_q[b]) + keys - queries
        found |= {
            "row_at": place,
            "seq_start": start,
            "seq_stop": start + keys,
            "seq_id": b,
            "seq_rows": queries,
        }
    return {
        name: torch.as_tensor(np.asarray(x), dtype=torch.int32, device=device) for name, x in found.items()
    }
