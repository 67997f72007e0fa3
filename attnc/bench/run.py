"""The run: everything that compiles does so in parallel processes first, then each cell is timed with all
peers taking turns.

A multiplication of two 8192 x 8192 matrices takes part in every cell: its speed there is the ceiling that the
cell's shares refer to, under the same clock and temperature.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch

from attnc.bench.cells import Cell, Inputs, Phase, draw
from attnc.bench.ours import OURS, TRITON, ours, same_bits
from attnc.bench.peers import PEERS, Peer, Unavailable, backward_of
from attnc.runtime.timing import Launch, Timing, interleave, interleave_flushed

_MATMUL = 8192
_MATMUL_FLOPS = 2.0 * _MATMUL**3
_CEILING = "matmul"
_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The timings of one phase of a cell by candidate name, why others are missing, and the matmul ceiling
    in TFLOP/s.

    timings: launches in bursts, which find in L2 what the one before left there; flushed: single launches
    that find nothing there.
    """

    cell: Cell
    timings: Mapping[str, Timing]
    missing: Mapping[str, str]
    ceiling: float
    phase: Phase = "forward"
    flushed: Mapping[str, Timing] = field(default_factory=dict)

    def tflops(self, name: str) -> float | None:
        timing = self.timings.get(name)
        return None if timing is None else self.cell.flops_of(self.phase) / timing.median * 1e-9


def best_peer(timings: Mapping[str, Timing]) -> str | None:
    """The fastest candidate besides attnc."""
    others = {name: timing.median for name, timing in timings.items() if name != OURS}
    return min(others, key=lambda name: others[name]) if others else None


def candidates(names: Iterable[str], target: str = "triton") -> tuple[Peer, ...]:
    """attnc's kernels for a target, and the peers of these names. KeyError for a name that is none."""
    known = known_peers(target)
    return (ours(target), *(known[name] for name in names if name != OURS))


def known_peers(target: str = "cuda.sm_80") -> dict[str, Peer]:
    """All whom attnc's kernels for a target can be timed beside, by name."""
    return {**PEERS, TRITON.name: TRITON, **{peer.name: peer for peer in same_bits(target)}}


def warm_up(cells: Sequence[Cell], peers: Sequence[Peer], phase: Phase = "forward") -> None:
    """Fills the compile caches of Triton and Inductor, which outlive the processes that fill them."""
    jobs = [(cell, peer, phase) for peer in peers if peer.compiles for cell in cells]
    workers = max(1, min(_WORKERS, (os.cpu_count() or 2) // 2, len(jobs)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(_launch_once, *zip(*jobs, strict=True)))


def measure(
    cells: Sequence[Cell],
    peers: Sequence[Peer],
    rounds: int,
    report: Callable[[str], None],
    phase: Phase = "forward",
) -> tuple[Result, ...]:
    """Times every cell. `report` is called with the name of each before it starts."""
    results = []
    for cell in cells:
        report(cell.name)
        results.append(_measure(cell, peers, rounds, phase))
        torch.cuda.empty_cache()
    return tuple(results)


def _measure(cell: Cell, peers: Sequence[Peer], rounds: int, phase: Phase) -> Result:
    inputs = draw(cell)
    launches: dict[str, Launch] = {}
    missing: dict[str, str] = {}
    for peer in peers:
        try:
            launch = _launch(peer, cell, inputs, phase)
            launch()
            torch.cuda.synchronize()
            launches[peer.name] = launch
        except Unavailable as reason:
            missing[peer.name] = str(reason)
        except Exception as failure:  # a peer that breaks is a gap in the table, not the end of the run
            missing[peer.name] = f"{type(failure).__name__}: {failure}".splitlines()[0][:120]
    launches[_CEILING] = _matmul(cell.torch_dtype)
    timings = interleave(launches, rounds)
    del launches[_CEILING]
    flushed = interleave_flushed(launches, rounds)
    ceiling = _MATMUL_FLOPS / timings.pop(_CEILING).median * 1e-9
    return Result(cell=cell, timings=timings, missing=missing, ceiling=ceiling, phase=phase, flushed=flushed)


def _launch(peer: Peer, cell: Cell, inputs: Inputs, phase: Phase) -> Launch:
    forward = peer.make(cell, inputs)
    return forward if phase == "forward" else backward_of(forward, inputs)


def _matmul(dtype: torch.dtype) -> Launch:
    a, b = (torch.randn(_MATMUL, _MATMUL, device="cuda").to(dtype) for _ in range(2))
    return lambda: a @ b


def _launch_once(cell: Cell, peer: Peer, phase: Phase) -> None:
    try:
        _launch(peer, cell, draw(cell), phase)()
        torch.cuda.synchronize()
    except Exception:  # the measurement meets the same failure and reports it
        return
