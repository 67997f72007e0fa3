"""Timing kernels on a GPU, fairly: all candidates in one run, taking turns, on the same data.

A GPU is power limited and drifts by several percent within a minute, so a candidate is never timed before or
after the others but between them, in an order that is shuffled for each round. A sample is the mean over
enough back-to-back launches to last `_SAMPLE_MS`, taken with CUDA events; or over single launches, before
each of which the L2 cache is flushed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch

Launch: TypeAlias = Callable[[], object]
#: Milliseconds of a launch, measured once.
Sampler: TypeAlias = Callable[[], float]
Which = TypeVar("Which", bound=Hashable)

_SAMPLE_MS = 10.0
_WARMUP = 3
#: Launches of a flushed sample, and cycles for which the GPU waits before them: the host is ahead then.
_FLUSHED, _AHEAD = 3, 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds per launch: the median of all samples, and their 10 % and 90 % quantiles."""

    median: float
    low: float
    high: float
    samples: int

    @property
    def spread(self) -> float:
        """Width of the middle 80 % as a share of the median."""
        return (self.high - self.low) / self.median

    def over(self, launches: int) -> Timing:
        """Returns the times of one launch, where so many launches were timed together."""
        return Timing(
            median=self.median / launches,
            low=self.low / launches,
            high=self.high / launches,
            samples=self.samples,
        )

    def microseconds(self) -> dict[str, float]:
        figures = {"us": self.median, "low": self.low, "high": self.high}
        return {name: round(milliseconds * 1e3, 3) for name, milliseconds in figures.items()}


def interleave(
    launches: Mapping[Which, Launch], rounds: int = 15, *, sample_ms: float = _SAMPLE_MS
) -> dict[Which, Timing]:
    """Times the candidates round by round, each round in another order. Needs a CUDA device.

    sample_ms: how long the launches of a sample take together, about.
    """
    samplers = {which: in_bursts(launch, sample_ms) for which, launch in launches.items()}
    return {which: summarise(samples) for which, samples in take_turns(samplers, rounds).items()}


def interleave_flushed(launches: Mapping[Which, Launch], rounds: int) -> dict[Which, Timing]:
    """Times the candidates, in turns too, by single launches that find nothing in the L2 cache. Needs a CUDA
    device.
    """
    size = 2 * torch.cuda.get_device_properties().L2_cache_size
    flushed = torch.empty(size, dtype=torch.uint8, device="cuda")
    for launch in launches.values():
        launch()
    samplers = {which: partial(_flushed_sample, launch, flushed) for which, launch in launches.items()}
    return {which: summarise(samples) for which, samples in take_turns(samplers, rounds).items()}


def take_turns(
    samplers: Mapping[Which, Sampler], rounds: int, report: Callable[[str], None] = lambda round_: None
) -> dict[Which, list[float]]:
    """Takes a sample of each in every round, in another order each time. `report` is called with the number
    of each round before it starts.
    """
    samples: dict[Which, list[float]] = {which: [] for which in samplers}
    for number, order in enumerate(orders(samplers, rounds), 1):
        report(f"round {number}")
        for which in order:
            samples[which].append(samplers[which]())
    return samples


def orders(names: Iterable[Which], rounds: int) -> Iterator[list[Which]]:
    """Yields the names in the order of each round, shuffled, the same in every run."""
    shuffled, draw = list(names), random.Random(0)
    for _ in range(rounds):
        draw.shuffle(shuffled)
        yield list(shuffled)


def summarise(samples: list[float]) -> Timing:
    """Returns the median and 10 % / 90 % quantiles of at least one sample."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(
        median=statistics.median(ordered),
        low=ordered[round(0.1 * last)],
        high=ordered[round(0.9 * last)],
        samples=len(ordered),
    )


def in_bursts(launch: Launch, sample_ms: float, agreed: Callable[[float], float] = float) -> Sampler:
    """Takes samples of launches in a row, as many as take `sample_ms` together, after some to warm up.

    agreed: of the milliseconds that were measured here, makes those that count where several processes launch
    together.
    """
    for _ in range(_WARMUP):
        launch()
    torch.cuda.synchronize()
    once = agreed(gpu_ms(launch, 2))
    repeats = max(1, min(500, round(sample_ms / max(once, 1e-3))))
    return lambda: agreed(gpu_ms(launch, repeats))


def gpu_ms(launch: Launch, repeats: int) -> float:
    """Milliseconds of the GPU for each of `repeats` launches in a row."""
    event: Any = torch.cuda.Event  # torch ships it without annotations
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


def host_ms(launch: Launch, repeats: int) -> float:
    """Milliseconds until each of `repeats` launches returns, with nothing on the GPU before them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        launch()
    return (time.perf_counter() - start) / repeats * 1e3


def _flushed_sample(launch: Launch, flushed: torch.Tensor) -> float:
    event: Any = torch.cuda.Event
    cuda: Any = torch.cuda  # torch ships it without annotations
    pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(_FLUSHED)]
    cuda._sleep(_AHEAD)
    for start, end in pairs:
        flushed.zero_()
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return sum(float(start.elapsed_time(end)) for start, end in pairs) / _FLUSHED


def capture_calls(calls: Sequence[Launch]) -> Launch:
    """Returns a launch of all the calls in turn, captured once; they are made once before, for what they
    allocate.
    """
    stream: Any = torch.cuda.Stream  # torch ships streams and graphs without annotations
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def launch(_alive: Sequence[Launch] = calls) -> None:  # what a graph reads and writes, it does not own
        graph.replay()

    return launch
