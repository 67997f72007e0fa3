"""What a rank takes of inputs and adds to their gradients, and the order of streams on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnc.distributed import stages
from attnc.distributed.derive import View
from attnc.distributed.plan import RowGroup
from attnc.distributed.stages import Lanes, add_view, view_of


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
    part = RowGroup(rows=np.arange(len(rows)), lo=lo, hi=lo + draw(st.integers(1, 5)), ready=False)
    x = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).float()
    view, tables = View(name="y", tensor="x", kinds=tuple(kinds)), {"_rows": rows, "_places": rows + 1}
    return view, part, tables, x, draw(st.integers(0, 3)), draw(st.integers(1, 4))


def taken(
    view: View, part: RowGroup, tables: dict[str, torch.Tensor], shape: torch.Size, first: int, heads: int
) -> list[list[int]]:
    """By axis, which places of the input a view takes; some are outside."""
    return [
        {
            "heads": list(range(first, first + heads)),
            "keys": list(range(part.lo, part.hi)),
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


class Stream:
    """Stands for a stream: what it was told, in order."""

    def __init__(self, name: str) -> None:
        self.name, self.told = name, list[str]()

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"waits for {other.name}")

    def record_event(self) -> str:
        return f"a mark of {self.name}"

    def wait_event(self, event: str) -> None:
        self.told.append(f"waits for {event}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stream]:
    """The caller's stream and the two others, and the one that is at hand, `now`."""
    known = {name: Stream(name) for name in ("main", "side", "second")}
    known["now"] = known["main"]

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before, known["now"] = known["now"], chosen
        yield
        known["now"] = before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: known["now"])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(stages, "_streams", lambda device: (known["side"], known["second"]))
    return known


class Used:
    """Stands for a tensor: the streams that use it."""

    def __init__(self) -> None:
        self.by = list[str]()

    def record_stream(self, stream: Stream) -> None:
        self.by.append(stream.name)


def test_exchanges_run_beside_kernels_on_a_gpu(streams: dict[str, Stream]) -> None:
    lanes = Lanes(torch.device("cuda", 0))
    assert [streams[name].told for name in ("main", "side", "second")] == [
        [],
        ["waits for main"],
        ["waits for main"],
    ]
    x, y = Used(), Used()
    moved: Any = x, y
    with lanes.exchanging(*moved):
        assert streams["now"].name == "side"
        event = lanes.mark()
    for number, name in enumerate(("main", "second", "main", "second")):
        with lanes.kernel(number, *moved):
            assert streams["now"].name == name
            lanes.after(event)
            lanes.after(None)
    assert streams["now"].name == "main"
    assert x.by == y.by == ["side", "main", "second", "main", "second"]
    after = ["waits for a mark of side"] * 2
    assert [streams[name].told for name in ("main", "second")] == [after, ["waits for main", *after]]
    lanes.join()
    assert streams["main"].told == [*after, "waits for side", "waits for second"]


def test_there_is_one_order_on_a_cpu() -> None:
    lanes = Lanes(torch.device("cpu"))
    with lanes.exchanging(torch.zeros(1)), lanes.kernel(1, torch.zeros(1)):
        assert lanes.mark() is None
    lanes.after(None)
    lanes.join()
