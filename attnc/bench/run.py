"""The run that all benchmarks share: cells, candidates that take turns in each, and results.

Everything that compiles does so in processes of its own first. Then each cell is timed with all candidates
taking turns on the same inputs, so that a GPU which drifts drifts under all of them.
"""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import torch

from attnc.bench.report import Page
from attnc.runtime.children import spawning_safely
from attnc.runtime.timing import Launch, Timing, capture_calls, interleave

#: Bytes that launches rotate over; the L2 cache of an H200 holds 50 MB.
ROTATED = 384 << 20
_GRAPH_SECONDS, _BYTES_A_SECOND, _LAUNCH_SECONDS = 4e-3, 4e12, 5e-6
_WORKERS = 12
Job: TypeAlias = Callable[[], None]
Report: TypeAlias = Callable[[str], None]


class TimedCell(Protocol):
    """What is measured: a row of a table."""

    @property
    def name(self) -> str: ...


CellT = TypeVar("CellT", bound=TimedCell)
MeasuredT = TypeVar("MeasuredT", bound=TimedCell, covariant=True)
InputsT = TypeVar("InputsT")
ResultsT = TypeVar("ResultsT")


class Unavailable(Exception):
    """A candidate cannot run a cell; the message says why, for the table."""


@dataclass(frozen=True, kw_only=True)
class Candidate(Generic[CellT, InputsT]):
    """A participant: who is measured.

    make: a launch for a cell and its inputs; raises Unavailable where there is none. compiles: its first
    launch takes seconds, so that it is worth warming up in parallel. ours: a generated kernel.
    """

    name: str
    title: str
    make: Callable[[CellT, InputsT], Launch]
    compiles: bool = False
    ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Generic[MeasuredT]):
    """Milliseconds of a launch by the candidate's name, and why others are missing.

    timings: launches that find in L2 what the one before left there, if they have the same inputs; flushed:
    single launches that find nothing there.
    """

    cell: MeasuredT
    timings: Mapping[str, Timing]
    missing: Mapping[str, str]
    flushed: Mapping[str, Timing] = field(default_factory=dict)

    def rate(self, work: float, name: str, unit: float = 1e12) -> float | None:
        """Returns how many units of this work a candidate does in a second; TFLOP/s of FLOPs."""
        timing = self.timings.get(name)
        return None if timing is None else 1e3 * work / timing.median / unit

    def figures(self, speeds: Callable[[str], Mapping[str, float]], **known: float) -> dict[str, Any]:
        """Returns microseconds with quantiles and speeds by the candidate's name, and why one is missing, as
        files have them. known: what holds for all.
        """
        results = {name: {**timing.microseconds(), **speeds(name)} for name, timing in self.timings.items()}
        return {"name": self.cell.name, **known, "results": results, "missing": dict(self.missing)}


class Contest(ABC, Generic[CellT, InputsT]):
    """Candidates that take turns, cell by cell."""

    #: Whether launches may be differentiated.
    needs_grad: ClassVar[bool] = False

    @abstractmethod
    def candidates(self, cell: CellT) -> Sequence[Candidate[CellT, InputsT]]:
        """Lists who takes part in a cell, in the order of the table's columns."""

    @abstractmethod
    def draw(self, cell: CellT, copies: int) -> Sequence[InputsT]:
        """Returns so many copies of the cell's inputs, on the current CUDA device."""

    def copies(self, cell: CellT) -> int:
        return 1

    def ready(self, cell: CellT, launches: Sequence[Launch]) -> Launch:
        """Returns what is timed of a candidate, whose launches, one for each copy of the inputs, run here
        first.
        """
        (launch,) = launches
        launch()
        torch.cuda.synchronize()
        return launch

    def time_cell(
        self, cell: CellT, launches: Mapping[str, Launch], missing: Mapping[str, str], rounds: int
    ) -> Result[CellT]:
        return Result(cell=cell, timings=interleave(launches, rounds), missing=missing)

    def jobs(self, cells: Sequence[CellT]) -> Sequence[Job]:
        """Returns a job for every cell and candidate that compiles, libraries first, which take longest."""
        found = [(cell, who) for cell in cells for who in self.candidates(cell) if who.compiles]
        found.sort(key=lambda job: job[1].ours)
        return [partial(_launch_once, self, cell, who.name) for cell, who in found]

    def measure(self, cells: Sequence[CellT], rounds: int, report: Report) -> Sequence[Result[CellT]]:
        """Times the cells. `report` is called with the name of each before it starts."""
        results = []
        for cell in cells:
            report(cell.name)
            results.append(self.measure_cell(cell, rounds))
            torch.cuda.empty_cache()
        return results

    def measure_cell(self, cell: CellT, rounds: int) -> Result[CellT]:
        """Times all candidates of a cell. One that breaks is a gap in the table, not the end of the run."""
        launches: dict[str, Launch] = {}
        missing: dict[str, str] = {}
        with torch.set_grad_enabled(self.needs_grad):
            copies = self.draw(cell, self.copies(cell))
            for candidate in self.candidates(cell):
                try:
                    made = [candidate.make(cell, x) for x in copies]
                    launches[candidate.name] = self.ready(cell, made)
                except Unavailable as reason:
                    missing[candidate.name] = str(reason)
                except Exception as failure:
                    missing[candidate.name] = first_line(failure)
            return self.time_cell(cell, launches, missing, rounds)


class Reads(TimedCell, Protocol):
    """A cell that memory bounds."""

    @property
    def bytes(self) -> int:
        """The bytes that a launch must read."""


ReadsT = TypeVar("ReadsT", bound=Reads)


class Rotation(Contest[ReadsT, InputsT], Generic[ReadsT, InputsT]):
    """A contest of launches as a server runs them: replays of CUDA graphs, in which copies of the inputs take
    turns that are together more than any L2 cache holds.
    """

    def copies(self, cell: ReadsT) -> int:
        return max(2, -(-ROTATED // cell.bytes))

    def ready(self, cell: ReadsT, launches: Sequence[Launch]) -> Launch:
        return capture_calls([*launches] * self._turns(cell))

    def time_cell(
        self, cell: ReadsT, launches: Mapping[str, Launch], missing: Mapping[str, str], rounds: int
    ) -> Result[ReadsT]:
        together = self.copies(cell) * self._turns(cell)
        timings = interleave(launches, rounds)
        of_one = {name: timing.over(together) for name, timing in timings.items()}
        return Result(cell=cell, timings=of_one, missing=missing)

    def _turns(self, cell: ReadsT) -> int:
        once = cell.bytes / _BYTES_A_SECOND + _LAUNCH_SECONDS
        return max(1, round(_GRAPH_SECONDS / once / self.copies(cell)))


class Benchmark(ABC, Generic[CellT, ResultsT]):
    """What one run of `attnc bench` measures, and how it is written down."""

    #: Of the files that are written.
    stem: ClassVar[str]

    @property
    @abstractmethod
    def cells(self) -> Sequence[CellT]:
        """All cells that there are."""

    @abstractmethod
    def describe(self, cell: CellT) -> str:
        """Returns the cell's line in a list of them."""

    def jobs(self, cells: Sequence[CellT]) -> Sequence[Job]:
        """Returns what compiles for these cells, to be called in processes of their own."""
        return ()

    def steps(self, cells: Sequence[CellT], rounds: int) -> int | None:
        return len(cells)

    @abstractmethod
    def measure(self, cells: Sequence[CellT], rounds: int, report: Report) -> ResultsT:
        """Times the cells. `report` is called with what comes next."""

    @abstractmethod
    def page(self, results: ResultsT, machine: Mapping[str, str]) -> Page:
        """Returns the results as text, as data and as a picture. machine: what they depend on."""


def first_line(failure: BaseException) -> str:
    """Returns what a table says of a failure."""
    return f"{type(failure).__name__}: {failure}".splitlines()[0][:120]


def warm_up(jobs: Sequence[Job]) -> None:
    """Calls every job in processes of their own, which fill the compile caches of Triton and Inductor."""
    workers = min(_WORKERS, max(1, (os.cpu_count() or 2) - 2), len(jobs))
    if workers > 0:
        spawn = multiprocessing.get_context("spawn")
        with spawning_safely(), ProcessPoolExecutor(workers, mp_context=spawn) as pool:
            list(pool.map(_call, jobs))


def _call(job: Job) -> None:
    job()


def _launch_once(contest: Contest[Any, Any], cell: TimedCell, name: str) -> None:
    """Calls a candidate, found by its name: what makes its launches need not go to another process."""
    with suppress(Exception), torch.set_grad_enabled(contest.needs_grad):  # the measurement reports failures
        (x,) = contest.draw(cell, 1)
        (candidate,) = (found for found in contest.candidates(cell) if found.name == name)
        candidate.make(cell, x)()
        torch.cuda.synchronize()
