"""The order of streams on a GPU, and which kernels run on which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import pytest
import torch

from attnc.distributed import ContextParallel, stages
from attnc.distributed.estimate import Rates
from attnc.distributed.stages import Lanes
from attnc.distributed.verify import RanksCase, run_case
from attnc.verify.case import Case
from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.verdict import Verdict
from tests.distributed.specs import SPECS
from tests.distributed.test_engine import SEEDS, dims_of
from tests.distributed.threads import Thread, on_ranks

ensure_interpreter()


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


class WatchedLanes(Lanes):
    """kernels: numbers of those that ran, which say on which stream; overlap: whether there are several."""

    def __init__(self, others: list[WatchedLanes], device: torch.device, *, overlap: bool = True) -> None:
        super().__init__(device, overlap=overlap)
        self.overlap, self.kernels = overlap, list[int]()
        others.append(self)

    def kernel(self, number: int, *tensors: torch.Tensor) -> Any:
        self.kernels.append(number)
        return super().kernel(number, *tensors)


#: Of a machine whose links take so long that rows which wait for nothing are computed first.
SLOW_LINKS = Rates(link=1e6, latency=0.0, launch=0.0, part=0.0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "groups"), [("window", 1), ("window", 2), ("alibi", 2), ("packed", 1), ("documents", 1)]
)
def test_rows_that_wait_for_nothing_are_computed_before_others(
    name: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has both kinds, and sums of both in the gradients of its keys. Kernels take turns on two
    streams, and the first of those that wait is not behind the one that does not. Those that add to gradients
    which parts of the heads share, here where no rows are ready, stay on one.
    """
    rates = None if name == "alibi" else SLOW_LINKS
    rows, lanes_of = 160, dict[int, list[WatchedLanes]]()
    case = Case(
        dims={**dims_of(name), "M": rows, "N": rows, **({"H": 4} if name == "alibi" else {"Hkv": 2})},
        seed=SEEDS.get(name, 1),
    )
    monkeypatch.setattr(
        stages,
        "Lanes",
        lambda *given, **options: WatchedLanes(lanes_of.setdefault(get_ident(), []), *given, **options),
    )

    def work(group: Thread) -> tuple[Verdict, set[bool]]:
        cp = ContextParallel(SPECS[name], group, groups=groups, strategy="need", rates=rates)
        verdict = run_case(cp, cp.spec.variants[0], RanksCase(case=case, strategy="need"))
        assert cp._plan is not None
        kinds = {part.ready for part in cp._plan.parts(group.rank)}
        turns = [number + (True in kinds) for number in range(groups)]
        packing = [1] * (groups > 1)
        forward, backward = lanes_of[get_ident()]
        assert forward.overlap == backward.overlap == (True in kinds or groups > 1)
        assert forward.kernels == packing + turns
        shared = [0] * groups if cp.kernels_for(torch.zeros(1, 1, 1, 16))[0].derived.grads else turns
        assert backward.kernels in (shared, packing + shared)
        return verdict, kinds

    found = on_ranks(2, work)
    assert ({True, False} in [kinds for _, kinds in found]) == (rates is SLOW_LINKS)
    assert found[0][0].ok, found[0][0].message
