"""`attnc bench --lists`: attention over lists of blocks and tokens, beside what PyTorch has, the libraries
that are installed, and attnc over all keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnc.bench.list_cells import ListCell, ListInputs, draw_inputs, list_cells
from attnc.bench.list_peers import ADDED, DENSE, OF_ROWS, OURS, PEERS, TRITON, ListPeer, ours
from attnc.bench.report import Page, document, figure, gaps, ran_on, table, to_the_best
from attnc.bench.run import Benchmark, Contest, Job, Report, Result
from attnc.runtime.timing import Launch, capture_calls, interleave

#: Milliseconds that the launches of a sample take, about.
_SAMPLE_MS = 5.0
#: Launches of a graph whose replay is timed, where cells are of single tokens.
_REPLAYED = 20


@dataclass(frozen=True, kw_only=True)
class ListBenchmark(Contest[ListCell, ListInputs], Benchmark[ListCell, Sequence[Result[ListCell]]]):
    """peers: names of `list_peers.PEERS`; seconds: after which no further cell begins, as the page says.
    clock: seconds since any moment.
    """

    stem: ClassVar[str] = "lists"
    needs_grad: ClassVar[bool] = True
    peers: Collection[str]
    seconds: float = 240.0
    clock: Callable[[], float] = time.monotonic

    @property
    def cells(self) -> Sequence[ListCell]:
        return list_cells()

    def describe(self, cell: ListCell) -> str:
        return f"{cell.name:58} {cell.flops * 1e-9:9.1f} GFLOP of {cell.kept_flops * 1e-9:9.1f}"

    def candidates(self, cell: ListCell) -> Sequence[ListPeer]:
        return (*ours(), *(PEERS[name] for name in self.peers))

    def draw(self, cell: ListCell, copies: int) -> Sequence[ListInputs]:
        return [draw_inputs(cell) for _ in range(copies)]

    def jobs(self, cells: Sequence[ListCell]) -> Sequence[Job]:
        return super().jobs(list({cell.form: cell for cell in reversed(cells)}.values()))

    def measure(self, cells: Sequence[ListCell], rounds: int, report: Report) -> Sequence[Result[ListCell]]:
        results: list[Result[ListCell]] = []
        ends = self.clock() + self.seconds
        for cell in cells:
            if results and self.clock() > ends:
                results.append(Result(cell=cell, timings={}, missing={OURS: "no time was left"}))
            else:
                results += super().measure([cell], rounds, report)
        return results

    def time_cell(
        self, cell: ListCell, launches: Mapping[str, Launch], missing: Mapping[str, str], rounds: int
    ) -> Result[ListCell]:
        if cell.queries > 1:
            timings = interleave(launches, rounds, sample_ms=_SAMPLE_MS)
            return Result(cell=cell, timings=timings, missing=missing)
        with torch.no_grad():
            several = {name: capture_calls([launch] * _REPLAYED) for name, launch in launches.items()}
        timings = interleave(several, rounds, sample_ms=_SAMPLE_MS)
        of_one = {name: timing.over(_REPLAYED) for name, timing in timings.items()}
        return Result(cell=cell, timings=of_one, missing=missing)

    def page(self, results: Sequence[Result[ListCell]], machine: Mapping[str, str]) -> Page:
        figures = [figures_of(result) for result in results]
        data = {"format": 1, "machine": dict(machine), "peers": list(self.peers), "cells": figures}
        return Page(markdown=self._markdown(results, machine), data=data)

    def _markdown(self, results: Sequence[Result[ListCell]], machine: Mapping[str, str]) -> str:
        peers = [PEERS[name] for name in self.peers]
        head = [
            "bf16",
            "us",
            "attnc",
            "added in any order",
            "Triton",
            "of the dense rate",
            "of the dense time",
        ]
        head += [*(peer.title for peer in peers), "to the best"]
        reasons = (f"{name}: {why}" for result in results for name, why in result.missing.items())
        return document(
            [ran_on(machine)],
            [
                "Medians of interleaved rounds in TFLOP/s of the pairs that lists name; what is made of the",
                "lists on the device is in the time of a call. The dense rate is attnc's over all keys, of",
                "latents over as many as a list names. Single tokens are replays of CUDA graphs.",
            ],
            table(head, (self._row(result) for result in results)),
            gaps(reasons),
        )

    def _row(self, result: Result[ListCell]) -> list[str]:
        cell, mine = result.cell, result.timings.get(OURS)
        share = share_of_dense(result)
        dense = result.timings.get(DENSE)
        of_time = mine.median / dense.median if mine and dense else None
        return [
            cell.name,
            figure(mine.median * 1e3 if mine else None),
            figure(result.rate(cell.flops, OURS)),
            figure(result.rate(cell.flops, ADDED)),
            figure(result.rate(cell.flops, TRITON)),
            figure(share, ".2f"),
            figure(of_time, ".2f"),
            *(figure(result.rate(cell.flops, name)) for name in self.peers),
            to_the_best(result.timings, OURS, [name for name in self.peers if name not in OF_ROWS]),
        ]


def share_of_dense(result: Result[ListCell]) -> float | None:
    """Returns attnc's rate over what lists name, as a share of its rate over all keys; None where memory
    bounds both.
    """
    if result.cell.queries == 1 and not result.cell.latent:
        return None
    dense, mine = (result.rate(_work(result.cell, name), name) for name in (DENSE, OURS))
    return None if dense is None or mine is None else mine / dense


def _work(cell: ListCell, name: str) -> float:
    return cell.kept_flops if name == DENSE and not cell.latent else cell.flops


def figures_of(result: Result[ListCell]) -> dict[str, Any]:
    """Returns a cell as the file has it: milliseconds with quantiles and TFLOP/s of everybody who took part,
    and why others did not.
    """
    cell = result.cell
    found = {
        name: {
            "ms": round(timing.median, 5), "low": round(timing.low, 5), "high": round(timing.high, 5),
            "tflops": round(_work(cell, name) / timing.median * 1e-9, 1),
        }
        for name, timing in result.timings.items()
    }  # fmt: skip
    share = share_of_dense(result)
    return {
        "name": cell.name,
        "job": cell.job,
        "flops": cell.flops,
        "dense_flops": cell.kept_flops,
        "of_dense_rate": None if share is None else round(share, 3),
        "results": found,
        "missing": dict(result.missing),
    }
