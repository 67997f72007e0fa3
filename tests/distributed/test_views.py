"""What a rank takes of inputs and adds to their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnc.distributed.derive import View
from attnc.distributed.plan import RowGroup
from attnc.distributed.views import add_view, view_of


@st.composite
def views(draw: st.DrawFn) -> tuple[View, RowGroup, dict[str, torch.Tensor], torch.Tensor, int, int]:
    """A view of an input, the part that takes it, its tables, the input, and the heads. At most one axis is
    of queries. Some of what is taken lies outside.
    """
    kinds: list[Any] = draw(st.lists(st.sampled_from(("whole", "heads", "keys")), min_size=1, max_size=3))
    if draw(st.booleans()):
        kinds[draw(st.integers(0, len(kinds) - 1))] = draw(st.sampled_from(("rows", "places")))
    shape = [draw(st.integers(0, 6)) for _ in kinds]
    rows = torch.tensor(draw(st.lists(st.integers(-2, 8), min_size=1, max_size=5)), dtype=torch.int32)
    lo = draw(st.integers(0, 4))
    hi, kept = lo + draw(st.integers(1, 5)), None
    if draw(st.booleans()):
        some = draw(st.sets(st.integers(lo, hi - 1), min_size=1))
        kept = np.asarray(sorted(some), np.int64)
    part = RowGroup(rows=np.arange(len(rows)), lo=lo, hi=hi, ready=False, kept=kept)
    x = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).float()
    view, tables = View(name="y", tensor="x", kinds=tuple(kinds)), {"_rows": rows, "_places": rows + 1}
    if kept is not None:
        tables["_keys"] = torch.from_numpy(kept).int()
    return view, part, tables, x, draw(st.integers(0, 3)), draw(st.integers(1, 4))


def taken(
    view: View, part: RowGroup, tables: dict[str, torch.Tensor], shape: torch.Size, first: int, heads: int
) -> list[list[int]]:
    """By axis, which places of the input a view takes; some are outside."""
    return [
        {
            "heads": list(range(first, first + heads)),
            "keys": part.keys.tolist(),
            "rows": tables["_rows"].tolist(),
            "places": tables["_places"].tolist(),
        }.get(kind, list(range(size)))
        for kind, size in zip(view.kinds, shape, strict=True)
    ]


@given(views())
def test_a_view_is_what_it_takes_and_0_outside(drawn: Any) -> None:
    view, part, tables, x, first, heads = drawn
    places = taken(view, part, tables, x.shape, first, heads)
    found = view_of(view, part, tables, x, first, heads)
    assert list(found.shape) == [len(axis) for axis in places]
    for at in np.ndindex(*found.shape):
        where = [axis[i] for axis, i in zip(places, at, strict=True)]
        is_inside = all(0 <= i < size for i, size in zip(where, x.shape, strict=True))
        assert found[at] == (x[tuple(where)] if is_inside else 0)


@given(views())
def test_what_a_view_takes_is_what_its_gradient_is_added_to(drawn: Any) -> None:
    view, part, tables, x, first, heads = drawn
    places = taken(view, part, tables, x.shape, first, heads)
    gradient = torch.randint(
        -8, 9, [len(axis) for axis in places], generator=torch.Generator().manual_seed(1)
    )
    total, expected = x.clone(), x.clone()
    add_view(view, part, tables, total, gradient.half(), first)
    for at in np.ndindex(*gradient.shape):
        where = [axis[i] for axis, i in zip(places, at, strict=True)]
        if all(0 <= i < size for i, size in zip(where, x.shape, strict=True)):
            expected[tuple(where)] += gradient[at]
    assert torch.equal(total, expected)
