"""Timing kernels on a GPU, fairly: all candidates in one run, taking turns, on the same data.

A GPU is power limited and drifts by several percent within a minute, so a candidate is never timed before or
after the others but between them, in an order that is shuffled for each round. A sample is the mean over
enough back-to-back launches to last `_SAMPLE_MS`, taken with CUDA events; or over single launches, before
each of which the L2 cache is flushed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Launch: TypeAlias = Callable[[], object]

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

    def microseconds(self) -> dict[str, float]:
        """Median and quantiles as reports write them."""
        figures = {"us": self.median, "low": self.low, "high": self.high}
        return {name: round(milliseconds * 1e3, 3) for name, milliseconds in figures.items()}


def interleave(
    launches: Mapping[str, Launch], rounds: int = 15, *, sample_ms: float = _SAMPLE_MS
) -> dict[str, Timing]:
    """Times the candidates round by round, each round in another order. Needs a CUDA device.

    sample_ms: how long the launches of a sample take together, about.
    """
    repeats = {name: _repeats(launch, sample_ms) for name, launch in launches.items()}
    return _by_turns(launches, rounds, lambda name: _sample(launches[name], repeats[name]))


def interleave_flushed(launches: Mapping[str, Launch], rounds: int = 15) -> dict[str, Timing]:
    """The same of launches that find nothing in the L2 cache. Needs a CUDA device."""
    size = 2 * torch.cuda.get_device_properties().L2_cache_size
    flushed = torch.empty(size, dtype=torch.uint8, device="cuda")
    for launch in launches.values():
        launch()
    return _by_turns(launches, rounds, lambda name: _flushed_sample(launches[name], flushed))


def _by_turns(names: Iterable[str], rounds: int, sample: Callable[[str], float]) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in names}
    for order in orders(samples, rounds):
        for name in order:
            samples[name].append(sample(name))
    return {name: summarise(values) for name, values in samples.items()}


def orders(names: Iterable[str], rounds: int) -> Iterator[list[str]]:
    """The names in the order of each round, shuffled, the same in every run."""
    shuffled, draw = list(names), random.Random(0)
    for _ in range(rounds):
        draw.shuffle(shuffled)
        yield list(shuffled)


def summarise(samples: list[float]) -> Timing:
    """Median and 10 % / 90 % quantiles of at least one sample."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(
        median=statistics.median(ordered),
        low=ordered[round(0.1 * last)],
        high=ordered[round(0.9 * last)],
        samples=len(ordered),
    )


def _repeats(launch: Launch, sample_ms: float) -> int:
    for _ in range(_WARMUP):
        launch()
    torch.cuda.synchronize()
    once = _sample(launch, 2)
    return max(1, min(500, round(sample_ms / max(once, 1e-3))))


def _sample(launch: Launch, repeats: int) -> float:
    event: Any = torch.cuda.Event  # torch ships it without annotations
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


def _flushed_sample(launch: Launch, flushed: torch.Tensor) -> float:
    """flushed: bytes that no L2 cache holds, which are written before each launch."""
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
