"""The run that benchmarks share: gaps, copies, and what goes to other processes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from attnc.bench import run
from attnc.bench.run import Candidate, Contest, Rotation, Unavailable, warm_up
from attnc.runtime.timing import Launch, Timing


@dataclass(frozen=True)
class Cell:
    name: str
    bytes: int = 1 << 30


def works(cell: Cell, x: int) -> Launch:
    return lambda: (cell, x)


def refuses(cell: Cell, x: int) -> Launch:
    raise Unavailable(f"not {cell.name}")


def breaks(cell: Cell, x: int) -> Launch:
    return lambda: 1 // 0


class Numbers(Contest[Cell, int]):
    def candidates(self, cell: Cell) -> Sequence[Candidate[Cell, int]]:
        return [
            Candidate(name="ours", title="ours", make=works, compiles=True, ours=True),
            Candidate(name="refuses", title="refuses", make=refuses),
            Candidate(name="breaks", title="breaks", make=breaks, compiles=True),
        ]

    def draw(self, cell: Cell, copies: int) -> Sequence[int]:
        return range(copies)


class Rotating(Numbers, Rotation[Cell, int]):
    pass


def in_milliseconds(launches: Mapping[str, Launch], rounds: int) -> dict[str, Timing]:
    return {name: Timing(median=12.0, low=11.0, high=13.0, samples=rounds) for name in launches}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(run, "interleave", in_milliseconds)


def test_who_breaks_is_a_gap_in_the_table() -> None:
    told: list[str] = []
    first, second = Numbers().measure([Cell("a"), Cell("b")], 5, told.append)
    assert told == ["a", "b"]
    assert set(first.timings) == {"ours"}
    assert first.missing == {
        "refuses": "not a",
        "breaks": "ZeroDivisionError: integer division or modulo by zero",
    }
    assert second.rate(2.4e12, "ours", 1e9) == 2.4e12 / 12e-3 / 1e9
    assert second.rate(1.0, "breaks") is None


def test_a_replay_counts_for_each_of_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def capture(launches: Sequence[Launch]) -> Launch:
        made.append(len(launches))
        return launches[0]

    monkeypatch.setattr(run, "capture_calls", capture)
    small = Cell("small", bytes=1 << 20)
    (result,) = Rotating().measure([small], 5, lambda _: None)
    copies = Rotating().copies(small)
    assert copies * small.bytes == run.ROTATED
    assert set(made) == {copies * max(1, round(4e-3 / (2**20 / 4e12 + 5e-6) / copies))}
    assert result.timings["ours"].median == 12.0 / made[0]
    assert Rotating().copies(Cell("large")) == 2


def test_libraries_are_warmed_up_first_and_by_name() -> None:
    jobs = Numbers().jobs([Cell("a"), Cell("b")])
    told = [job.args[1:] for job in jobs if isinstance(job, partial)]
    assert told == [(Cell(n), who) for who in ("breaks", "ours") for n in "ab"]
    for job in pickle.loads(pickle.dumps(jobs)):
        job()  # who breaks says so when it is timed
    warm_up(())
