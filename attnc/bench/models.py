"""`attnc bench --models`: calls as models make them, through attnc's public functions and without a schedule,
beside what PyTorch has and the libraries that are installed.

Every cell says who took part. Single tokens and drafts are replays of CUDA graphs, as engines run them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any, ClassVar

import torch

from attnc.bench.model_cells import ModelCell, ModelInputs, draw_inputs, model_cells
from attnc.bench.model_peers import (
    DETERMINISTIC,
    ONE_TENSOR,
    OURS,
    PEERS,
    READERS_OF_PAGES,
    READERS_OF_TENSORS,
    SAME_BITS,
    ModelPeer,
    ours,
    ours_of_one_tensor,
)
from attnc.bench.odd_cells import odd_cells
from attnc.bench.report import Page, document, figure, gaps, ran_on, table, to_the_best
from attnc.bench.run import Benchmark, Contest, Job, Report, Result
from attnc.runtime.timing import Launch, Timing, capture_calls, interleave, interleave_flushed

#: Milliseconds that the launches of a sample take, about.
_SAMPLE_MS = 5.0
#: Launches of a graph whose replay is timed.
_REPLAYED = 20
#: Jobs that engines run as CUDA graphs.
_REPLAYS = ("drafts", "decoding")
#: What the summary counts together: jobs, the candidate, and whom it is beside, empty for all whose bits may
#: differ from run to run.
_GROUPS: Mapping[str, tuple[Collection[str], str, Collection[str]]] = {
    "forward": (("prompt", "chunk"), OURS, ()),
    "gradients, the fastest": (("training",), OURS, ()),
    "gradients, the same bits in every run": (("training",), DETERMINISTIC, ()),
    "the same, beside those of peers": (("training",), DETERMINISTIC, SAME_BITS),
    "drafts and decoding": (_REPLAYS, OURS, ()),
    "the same, beside peers that read pages": (_REPLAYS, OURS, READERS_OF_PAGES),
    "the same from one tensor, beside peers that read one": (_REPLAYS, ONE_TENSOR, READERS_OF_TENSORS),
}


@dataclass(frozen=True, kw_only=True)
class ModelBenchmark(Contest[ModelCell, ModelInputs], Benchmark[ModelCell, Sequence[Result[ModelCell]]]):
    """peers: names of `model_peers.PEERS`; seconds: after which no further cell begins, whose absence the
    page states; is_odd: sizes that no table has, in place of those of models. clock: seconds since any
    moment. left: the names of cells that did not begin.
    """

    stem: ClassVar[str] = "models"
    needs_grad: ClassVar[bool] = True
    peers: Collection[str]
    seconds: float = 240.0
    is_odd: bool = False
    clock: Callable[[], float] = time.monotonic
    left: list[str] = field(default_factory=list, compare=False)

    @property
    def cells(self) -> Sequence[ModelCell]:
        return odd_cells() if self.is_odd else model_cells()

    def describe(self, cell: ModelCell) -> str:
        work = f"{cell.flops * 1e-9:9.1f} GFLOP {cell.bytes * 1e-6:8.1f} MB"
        return f"{cell.name:50} {_shape(cell):24} {work}"

    def candidates(self, cell: ModelCell) -> Sequence[ModelPeer]:
        both = (True, False) if cell.job == "training" else (False,)
        others = (PEERS[name] for name in self.peers)
        tensor = (ours_of_one_tensor(),) if cell.page and cell.job in _REPLAYS else ()
        return (*(ours(deterministic=deterministic) for deterministic in reversed(both)), *tensor, *others)

    def draw(self, cell: ModelCell, copies: int) -> Sequence[ModelInputs]:
        return [draw_inputs(cell) for _ in range(copies)]

    def jobs(self, cells: Sequence[ModelCell]) -> Sequence[Job]:
        return super().jobs(list({cell.form: cell for cell in reversed(cells)}.values()))

    def measure(self, cells: Sequence[ModelCell], rounds: int, report: Report) -> Sequence[Result[ModelCell]]:
        results: list[Result[ModelCell]] = []
        ends = self.clock() + self.seconds
        for at, cell in enumerate(cells):
            if results and self.clock() > ends:
                self.left[:] = [each.name for each in cells[at:]]
                break
            results += super().measure([cell], rounds, report)
        return results

    def time_cell(
        self, cell: ModelCell, launches: Mapping[str, Launch], missing: Mapping[str, str], rounds: int
    ) -> Result[ModelCell]:
        if cell.job not in _REPLAYS:
            timings = interleave(launches, rounds, sample_ms=_SAMPLE_MS)
            return Result(
                cell=cell, timings=timings, missing=missing, flushed=interleave_flushed(launches, rounds)
            )
        with torch.no_grad():
            single = {name: capture_calls([launch]) for name, launch in launches.items()}
            several = {name: capture_calls([launch] * _REPLAYED) for name, launch in launches.items()}
        timings = interleave(several, rounds, sample_ms=_SAMPLE_MS)
        of_one = {name: timing.over(_REPLAYED) for name, timing in timings.items()}
        return Result(cell=cell, timings=of_one, missing=missing, flushed=interleave_flushed(single, rounds))

    def page(self, results: Sequence[Result[ModelCell]], machine: Mapping[str, str]) -> Page:
        data = {
            "format": 1,
            "machine": dict(machine),
            "peers": list(self.peers),
            "cells": [figures_of(result) for result in results],
        }
        return Page(markdown=self._markdown(results, machine), data=data)

    def _markdown(self, results: Sequence[Result[ModelCell]], machine: Mapping[str, str]) -> str:
        titles = {peer.name: peer.title for peer in PEERS.values() if peer.name in self.peers}
        head = [
            "bf16",
            "shape",
            "us",
            "",
            "the same bits",
            "one tensor",
            *titles.values(),
            "to the best",
            "flushed",
        ]
        reasons = (
            f"{name} in {result.cell.name}: {why}"
            for result in results
            for name, why in result.missing.items()
        )
        return document(
            [ran_on(machine)],
            [
                "Medians of interleaved rounds: TFLOP/s, of drafts and single tokens GB/s of q, k, v and o.",
                "flushed: with nothing of the inputs in L2, to the best.",
            ],
            summary([figures_of(result) for result in results]),
            table(head, (self._row(result, list(titles)) for result in results)),
            [f"Not measured, for lack of time: {', '.join(self.left)}."] if self.left else [],
            gaps(reasons),
        )

    def _row(self, result: Result[ModelCell], peers: Sequence[str]) -> list[str]:
        cell, mine = result.cell, result.timings.get(OURS)
        work, unit = _work(cell)
        names = (OURS, DETERMINISTIC, ONE_TENSOR, *peers)
        speeds = [figure(result.rate(work, name, unit)) for name in names]
        return [
            cell.name,
            _shape(cell),
            figure(mine.median * 1e3 if mine else None),
            *speeds,
            to_the_best(result.timings, OURS, peers),
            to_the_best(result.flushed, OURS, peers),
        ]


def _work(cell: ModelCell) -> tuple[float, float]:
    """Returns what a cell's speed counts, and its unit: bytes where memory bounds it, but for latents."""
    is_bound = cell.job in _REPLAYS and not cell.latent
    return (float(cell.bytes), 1e9) if is_bound else (cell.flops, 1e12)


def _shape(cell: ModelCell) -> str:
    value = f"/{cell.value}" if cell.value else ""
    kinds = ["causal"] * cell.causal + [f"w{cell.window}"] * (cell.window is not None)
    kinds += ["softcap"] * bool(cell.softcap) + ["sink"] * cell.sink + [f"p{cell.page}"] * bool(cell.page)
    return " ".join((f"h{cell.heads}/{cell.kv_heads} d{cell.width}{value}", *kinds))


def figures_of(result: Result[ModelCell]) -> dict[str, Any]:
    """Returns a cell as the file has it: milliseconds with quantiles, warm and flushed, of everybody who took
    part, and why others did not.
    """
    cell = result.cell
    work, unit = _work(cell)
    results = {
        name: {
            **_milliseconds(timing),
            "tflops" if unit == 1e12 else "gbs": round(work / timing.median * 1e3 / unit, 1),
            **({"flushed": _milliseconds(result.flushed[name])} if name in result.flushed else {}),
        }
        for name, timing in result.timings.items()
    }
    return {
        "name": cell.name,
        "job": cell.job,
        "shape": _shape(cell),
        "flops": cell.flops,
        "bytes": cell.bytes,
        "took_part": list(results),
        "results": results,
        "missing": dict(result.missing),
    }


def _milliseconds(timing: Timing) -> dict[str, float]:
    figures = {"ms": timing.median, "low": timing.low, "high": timing.high}
    return {name: round(milliseconds, 5) for name, milliseconds in figures.items()}


def summary(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the table of how many times as fast as the best peer of a cell attnc is: the slowest cell, the
    geometric mean and the fastest, of cells as `figures_of` writes them.
    """
    rows = []
    for title, (jobs, who, peers) in _GROUPS.items():
        found = {
            cell["name"]: times
            for cell in cells
            if cell["job"] in jobs and (times := _to_best(cell, who, peers))
        }
        if found:
            slowest = min(found, key=lambda name: found[name])
            behind = sum(times < 1 for times in found.values())
            rows.append([
                title, len(found), f"{found[slowest]:.2f}x ({slowest})",
                f"{geometric_mean(found.values()):.2f}x", f"{max(found.values()):.2f}x", behind,
            ])  # fmt: skip
    return table(["", "cells", "slowest", "geometric mean", "fastest", "behind"], rows) if rows else []


def _to_best(cell: Mapping[str, Any], who: str, peers: Collection[str]) -> float | None:
    times = {name: found["ms"] for name, found in cell["results"].items()}
    left_out = (OURS, DETERMINISTIC, ONE_TENSOR, *SAME_BITS)
    others = [ms for name, ms in times.items() if (name in peers if peers else name not in left_out)]
    return min(others) / times[who] if others and who in times else None
