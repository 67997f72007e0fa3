"""The order of streams on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attnc.distributed import stages
from attnc.distributed.stages import Lanes


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
