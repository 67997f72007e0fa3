"""`attnc bench`: the forward or the gradients of attention beside the libraries, in TFLOP/s.

A multiplication of two 8192 x 8192 matrices takes part in every cell: its speed there is the ceiling that the
cell's shares refer to, under the same clock and temperature.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from attnc.bench.cells import Cell, Inputs, Phase, draw
from attnc.bench.peers import OURS, PEERS, TRITON, Make, Peer, backward_of, ours, same_bits
from attnc.bench.report import (
    IN_TFLOPS,
    Draw,
    Page,
    document,
    figure,
    gaps,
    grouped_bars,
    ran_on,
    spread,
    table,
    to_the_best,
)
from attnc.bench.run import Benchmark, Contest, Result
from attnc.runtime.timing import Launch, Timing, interleave, interleave_flushed

_MATMUL = 8192
_MATMUL_FLOPS = 2.0 * _MATMUL**3


def _matmul(cell: Cell, _: Inputs) -> Launch:
    a, b = (torch.randn(_MATMUL, _MATMUL, device="cuda").to(cell.torch_dtype) for _ in range(2))
    return lambda: a @ b


CEILING = Peer(name="matmul", title="matmul", make=_matmul)


def known_peers(target: str = "cuda.sm_80") -> dict[str, Peer]:
    """Returns all peers of attnc's kernels for a target, by name."""
    return {**PEERS, TRITON.name: TRITON, **{peer.name: peer for peer in same_bits(target)}}


@dataclass(frozen=True, kw_only=True)
class AttentionBenchmark(Contest[Cell, Inputs], Benchmark[Cell, Sequence[Result[Cell]]]):
    """Times one phase of attention. offered: the cells; peers: names of `known_peers`."""

    stem: ClassVar[str] = "bench"
    needs_grad: ClassVar[bool] = True
    offered: tuple[Cell, ...]
    peers: Collection[str]
    target: str = "triton"
    phase: Phase = "forward"

    @property
    def cells(self) -> Sequence[Cell]:
        return self.offered

    def describe(self, cell: Cell) -> str:
        return cell.describe(self.phase)

    def columns(self) -> tuple[Peer, ...]:
        known = known_peers(self.target)
        return (ours(self.target), *(known[name] for name in self.peers if name != OURS))

    def candidates(self, cell: Cell) -> Sequence[Peer]:
        if self.phase == "forward":
            return (*self.columns(), CEILING)
        gradients = (replace(peer, make=partial(_backward, peer.make)) for peer in self.columns())
        return (*gradients, CEILING)

    def draw(self, cell: Cell, copies: int) -> Sequence[Inputs]:
        return [draw(cell) for _ in range(copies)]

    def time_cell(
        self, cell: Cell, launches: Mapping[str, Launch], missing: Mapping[str, str], rounds: int
    ) -> Result[Cell]:
        timings = interleave(launches, rounds)
        alone = {name: launch for name, launch in launches.items() if name != CEILING.name}
        flushed = interleave_flushed(alone, rounds)
        return Result(cell=cell, timings=timings, missing=missing, flushed=flushed)

    def page(self, results: Sequence[Result[Cell]], machine: Mapping[str, str]) -> Page:
        return Page(
            markdown=self._markdown(results, machine),
            data={
                "format": 1,
                "phase": self.phase,
                "machine": dict(machine),
                "cells": [self._figures(result) for result in results],
            },
            draw=self._draw(results, machine["device"]),
        )

    def _markdown(self, results: Sequence[Result[Cell]], machine: Mapping[str, str]) -> str:
        mine, *others = self.columns()
        head = [self._title(results), mine.title, "spread", *(peer.title for peer in others)]
        head += ["to the best", "of matmul", f"{mine.title}, flushed", "to the best, flushed"]
        reasons = (f"{name}: {reason}" for result in results for name, reason in result.missing.items())
        return document(
            [ran_on(machine)],
            [
                IN_TFLOPS,
                "Launches follow one another; flushed: one at a time, with nothing of its inputs in L2.",
            ],
            table(head, (self._row(result, others) for result in results)),
            gaps(reasons),
        )

    def _row(self, result: Result[Cell], others: Sequence[Peer]) -> list[str]:
        libraries = [peer.name for peer in others if not peer.ours]
        flops = result.cell.flops_of(self.phase)
        speed, ceiling = result.rate(flops, OURS), _ceiling(result)
        flushed = result.flushed.get(OURS)
        return [
            result.cell.name,
            figure(speed),
            spread(result.timings.get(OURS)),
            *(figure(result.rate(flops, peer.name)) for peer in others),
            to_the_best(result.timings, OURS, libraries),
            figure(100 * speed / ceiling if speed and ceiling else None, unit=" %"),
            figure(flops / flushed.median * 1e-9 if flushed else None),
            to_the_best(result.flushed, OURS, libraries),
        ]

    def _figures(self, result: Result[Cell]) -> dict[str, Any]:
        flops = result.cell.flops_of(self.phase)
        return {
            "name": result.cell.name,
            "flops": flops,
            "matmul_tflops": round(_ceiling(result) or 0.0, 1),
            "results": {
                name: {
                    **_milliseconds(timing),
                    "tflops": round(flops / timing.median * 1e-9, 1),
                    **({"flushed": _milliseconds(result.flushed[name])} if name in result.flushed else {}),
                }
                for name, timing in result.timings.items()
                if name != CEILING.name
            },
            "missing": dict(result.missing),
        }

    def _draw(self, results: Sequence[Result[Cell]], device: str) -> Draw:
        def draw(plt: Any) -> Any:
            peers = self.columns()
            made, axes = plt.subplots(figsize=(9, 1 + 0.16 * len(peers) * len(results) + 0.2 * len(results)))
            speeds = {
                peer.title: [r.rate(r.cell.flops_of(self.phase), peer.name) or 0.0 for r in results]
                for peer in peers
            }
            grouped_bars(axes, [r.cell.name for r in results], speeds)
            axes.set_xlabel("TFLOP/s (longer is faster)")
            axes.set_title(f"Attention {self._title(results)}, {device}")
            axes.legend(loc="lower right")
            made.tight_layout()
            return made

        return draw

    def _title(self, results: Sequence[Result[Cell]]) -> str:
        return f"{self.phase}, {results[0].cell.dtype if results else 'bf16'}"


def _backward(forward: Make, cell: Cell, x: Inputs) -> Launch:
    return backward_of(forward(cell, x), x)


def _ceiling(result: Result[Cell]) -> float | None:
    return result.rate(_MATMUL_FLOPS, CEILING.name)


def _milliseconds(timing: Timing) -> dict[str, float]:
    figures = {"ms": timing.median, "low": timing.low, "high": timing.high}
    return {name: round(milliseconds, 5) for name, milliseconds in figures.items()}
