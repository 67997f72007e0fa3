"""Decode steps on the clock: CUDA graphs that rotate over copies of the inputs, taking turns; and calls.

A graph's replay takes the host out of the time: so a server runs, and kernels of ten microseconds could not
be told apart otherwise. What a call costs the host is timed apart.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch

from attnc.bench.decode import DecodeCell, draw_decode, scaling_cells
from attnc.bench.decode_peers import PEERS, Decoder
from attnc.runtime.timing import Launch, Timing, summarise

_SAMPLE_SECONDS, _BYTES_A_SECOND, _LAUNCH_SECONDS = 4e-3, 4e12, 5e-6
_EAGER_CALLS, _EAGER_ROUNDS = 200, 15
_WORKERS = 14
Inputs = TypeVar("Inputs")
Job: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    """Milliseconds of a step by candidate, and why others are missing."""

    cell: DecodeCell
    timings: Mapping[str, Timing]
    missing: Mapping[str, str]

    def speed(self, name: str) -> float | None:
        """GB/s of K and V."""
        timing = self.timings.get(name)
        return None if timing is None else self.cell.bytes / timing.median * 1e-6

    def best_peer(self) -> str | None:
        """The fastest candidate that is not generated."""
        peers = {peer.name for peer in PEERS}
        others = {name: timing.median for name, timing in self.timings.items() if name in peers}
        return min(others, key=lambda name: others[name]) if others else None


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph of rounds of launches. It reads the tensors that the launches hold, so it holds them."""

    graph: Any
    launches: Sequence[Launch]
    turns: int

    def sample(self) -> float:
        """Milliseconds of a launch."""
        event: Any = torch.cuda.Event  # torch ships it without annotations
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / (self.turns * len(self.launches))


def warm_up(jobs: Sequence[Job]) -> None:
    """Calls every job in processes of their own, which fill the compile caches of Triton and Inductor."""
    workers = min(_WORKERS, max(1, (os.cpu_count() or 2) - 2), len(jobs))
    if workers > 0:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_call, jobs))


def _call(job: Job) -> None:
    job()


def decode_jobs(cells: Sequence[DecodeCell], decoders: Sequence[Decoder]) -> list[Job]:
    """What to warm up, the slowest first."""
    made = [decoder for decoder in reversed(decoders) if decoder.compiles]
    return [partial(_launch_once, cell, x) for x in made for cell in cells if is_timed(cell, x.name)]


def is_timed(cell: DecodeCell, name: str) -> bool:
    """FlexAttention gives one sequence to a few programs: how long it takes for longer ones goes without
    saying.
    """
    return name != "flex" or cell not in scaling_cells()


def _launch_once(cell: DecodeCell, decoder: Decoder) -> None:
    (x,) = draw_decode(cell, 1)
    try:
        with torch.no_grad():
            decoder.make(x)()
        torch.cuda.synchronize()
    except Exception:  # the measurement meets the same failure and reports it
        return


def measure_decode(
    cells: Sequence[DecodeCell], decoders: Sequence[Decoder], rounds: int, report: Callable[[str], None]
) -> tuple[DecodeResult, ...]:
    """Times every cell. `report` is called with the name of each before it starts."""
    results = []
    for cell in cells:
        report(cell.name)
        with torch.no_grad():
            results.append(_measure(cell, decoders, rounds))
        torch.cuda.empty_cache()
    return tuple(results)


def _measure(cell: DecodeCell, decoders: Sequence[Decoder], rounds: int) -> DecodeResult:
    copies = draw_decode(cell, cell.copies)
    makers = {decoder.name: decoder.make for decoder in decoders if is_timed(cell, decoder.name)}
    timings, missing = take_turns(copies, makers, cell.bytes, rounds)
    return DecodeResult(cell=cell, timings=timings, missing=missing)


def take_turns(
    copies: Sequence[Inputs], makers: Mapping[str, Callable[[Inputs], Launch]], size: int, rounds: int
) -> tuple[Mapping[str, Timing], Mapping[str, str]]:
    """Times of a launch by candidate, and why others are missing. size: bytes that a launch reads."""
    graphs: dict[str, Captured] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        try:
            graphs[name] = capture(size, [make(x) for x in copies])
        except Exception as failure:  # a peer that breaks is a gap in the table, not the end of the run
            missing[name] = f"{type(failure).__name__}: {failure}".splitlines()[0][:120]
            torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    order = list(graphs)
    for _ in range(rounds):
        for name in order:
            samples[name].append(graphs[name].sample())
        order = order[1:] + order[:1]
    return {name: summarise(values) for name, values in samples.items()}, missing


def capture(size: int, launches: Sequence[Launch]) -> Captured:
    """A graph of some milliseconds in which the copies take turns, replayed once."""
    for launch in (*launches, *launches):
        launch()
    torch.cuda.synchronize()
    once = size / _BYTES_A_SECOND + _LAUNCH_SECONDS
    turns = max(1, round(_SAMPLE_SECONDS / once / len(launches)))
    graph: Any = torch.cuda.CUDAGraph()  # torch ships it without annotations
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for launch in launches:
                launch()
    captured = Captured(graph, launches, turns)
    captured.sample()
    return captured


def eager_cost(decoders: Sequence[Decoder]) -> dict[str, float]:
    """Microseconds that the host spends on a call, by candidate: medians of interleaved rounds on a cache so
    small that the GPU never holds it up.
    """
    (x,) = draw_decode(DecodeCell(batch=1, heads=32, kv_heads=8, length=1024), 1)
    launches: dict[str, Launch] = {}
    samples: dict[str, list[float]] = {}
    with torch.no_grad():
        for decoder in decoders:
            try:
                launch = decoder.make(x)
                launch()
                launch()
                launches[decoder.name] = launch
            except Exception:  # the table of speeds says why
                continue
        for _ in range(_EAGER_ROUNDS):
            for name, launch in launches.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(_EAGER_CALLS):
                    launch()
                samples.setdefault(name, []).append((time.perf_counter() - start) / _EAGER_CALLS * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}
