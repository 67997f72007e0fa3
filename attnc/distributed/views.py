"""Inputs as a rank sees them: its rows, keys and heads of each, by tables of positions that derived specs
read (`derive.TABLES`); and their gradients, added to those of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from attnc.distributed.derive import View
from attnc.distributed.plan import Plan, RowGroup
from attnc.distributed.spans import Ints
from attnc.model.attention import Attention


def view_of(
    view: View,
    part: RowGroup,
    tables: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    first: int,
    heads: int,
    stops: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Returns the input as the derived spec reads it, with query heads first .. first + heads - 1. What lies
    outside of x is 0, as everywhere in the language. stops: where no row, or no place, is negative, the one
    behind the last.
    """
    stops = stops or {}
    for axis, kind in enumerate(view.kinds):
        match kind:
            case "heads":
                x = _slice_padded(x, axis, first, heads)
            case "keys" if part.kept is None:
                x = _slice_padded(x, axis, part.lo, part.hi - part.lo)
            case "rows" | "places" | "keys":
                rows = tables[f"_{kind}"]
                inside = stops.get(kind, x.shape[axis] + 1) <= x.shape[axis]
                x = x.index_select(axis, rows) if inside else _take_padded(x, axis, rows)
            case _:
                continue
    return x


def add_view(
    view: View,
    part: RowGroup,
    tables: Mapping[str, torch.Tensor],
    total: torch.Tensor,
    gradient: torch.Tensor,
    first: int,
) -> None:
    """Adds the gradient of a view to that of the whole input, in f32."""
    gradient = gradient.float()
    for axis, kind in enumerate(view.kinds):
        if kind == "keys" and part.kept is not None:
            shape = [*gradient.shape[:axis], part.hi - part.lo, *gradient.shape[axis + 1 :]]
            at = tables["_keys"].long() - part.lo
            gradient = gradient.new_zeros(shape).index_copy_(axis, at, gradient)
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
    size = x.shape[axis]
    inside = x.narrow(axis, min(first, size), max(min(count, size - first), 0))
    missing = count - inside.shape[axis]
    if not missing:
        return inside
    shape = [*x.shape[:axis], missing, *x.shape[axis + 1 :]]
    return torch.cat((inside, x.new_zeros(shape)), axis)


def _take_padded(x: torch.Tensor, axis: int, rows: torch.Tensor) -> torch.Tensor:
    size = x.shape[axis]
    if not size:
        return x.new_zeros([*x.shape[:axis], len(rows), *x.shape[axis + 1 :]])
    inside = (rows >= 0) & (rows < size)
    found = x.index_select(axis, rows.clamp(0, size - 1))
    shape = [1] * x.dim()
    shape[axis] = len(rows)
    return torch.where(inside.view(shape), found, torch.zeros((), dtype=x.dtype, device=x.device))


def tables_of(
    plan: Plan,
    attention: Attention,
    rows: Ints,
    first_key: int,
    device: torch.device,
    kept: Ints | None = None,
) -> Mapping[str, torch.Tensor]:
    """Returns every table for these query rows, against keys from `first_key` on, or those that are `kept`;
    `_rows`, `_places` and `_keys` are where views take what they have from.

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
    if kept is not None:
        found["_keys"] = kept

    def in_window(place: Ints) -> Ints:
        """Counts positions from the first key, and where some are left out, those that are not."""
        if kept is None or not len(kept):
            return place - first_key
        return np.where(place < kept[0], place - kept[0], kept.searchsorted(place))

    if sizes.ends_q is None:
        places = rows if attention.lengths else plan.places(rows)
        found |= {"row_at": in_window(places), "_rows": rows, "_places": places}
    else:
        assert sizes.ends_k is not None, "keys are packed where queries are"
        b = np.searchsorted(sizes.ends_q, rows, "right") - 1
        queries, keys = np.diff(sizes.ends_q)[b], np.diff(sizes.ends_k)[b]
        if (queries > keys).any():
            raise ValueError("a packed sequence has more queries than keys, which ranks cannot share out")
        start = sizes.ends_k[b]
        found |= {
            "row_at": in_window(plan.places(rows)),
            "seq_start": in_window(start),
            "seq_stop": in_window(start + keys),
            "seq_id": b,
            "seq_rows": queries,
        }
    return {
        name: torch.as_tensor(np.asarray(x), dtype=torch.int32, device=device) for name, x in found.items()
    }
