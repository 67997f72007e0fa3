"""`attnc bench --flex`: programs of FlexAttention, torch's kernels beside attnc's, from the same mods.

Times of kernels come from one interleaved run. How long a program waits for its first result, and for one of
another length, is measured in new processes with empty caches.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from attnc.bench.flex_programs import LENGTH, LENGTHS, MODS, OURS, SMALL, TORCH, TRITON, B, D, H, call
from attnc.bench.host_cost import measure_calls
from attnc.bench.report import Page, document, figure, ran_on, ratio, table
from attnc.bench.run import Benchmark, Candidate, Contest, Report
from attnc.runtime.children import module_command
from attnc.runtime.timing import Launch, Timing
from attnc.support.cache import own_folder

_COLUMNS = (
    "target",
    *("forward ms", "Triton", "Flex", "ratio"),
    *("with gradients ms", "Triton", "Flex", "ratio"),
    *("first s", "Flex", "lengths s", "Flex", "host us", "Flex"),
)


@dataclass(frozen=True, slots=True)
class FlexProgram:
    """One of `MODS`."""

    name: str


@dataclass(frozen=True, slots=True)
class FlexResult:
    """What was measured of one program. target: what its calls pick; forward, both: milliseconds of the
    forward, and with gradients, by whose they are; first: seconds until the results for `LENGTHS`, in turn;
    host: microseconds of the host for a call.
    """

    name: str
    target: str
    forward: Mapping[str, Timing]
    both: Mapping[str, Timing]
    first: Mapping[str, Sequence[float]]
    host: Mapping[str, float]


def target_of_call(name: str) -> str:
    """Returns what a call of the program picks."""
    from attnc.flex import family_of

    q = torch.empty((B, H, LENGTH, D), device="cuda", dtype=torch.bfloat16)
    score_mod, mask_mod = MODS[name](LENGTH, "cuda")
    return family_of(q, q, q, score_mod, mask_mod=mask_mod).target


class _Programs(Contest[FlexProgram, None]):
    """Forwards, and forwards with gradients. A call draws its own inputs."""

    needs_grad: ClassVar[bool] = True

    def candidates(self, cell: FlexProgram) -> Sequence[Candidate[FlexProgram, None]]:
        targets = (OURS, TORCH) if target_of_call(cell.name) == TRITON else (OURS, TRITON, TORCH)
        return [
            Candidate(
                name=f"{who} {phase}", title=who, make=partial(_timed_call, who, phase), ours=who != TORCH
            )
            for who in targets
            for phase in ("forward", "both")
        ]

    def draw(self, cell: FlexProgram, copies: int) -> Sequence[None]:
        return [None] * copies


def _timed_call(who: str, phase: str, cell: FlexProgram, _: None) -> Launch:
    return call(who, cell.name, LENGTH, gradients=phase == "both")


@dataclass(frozen=True, kw_only=True)
class FlexBenchmark(Benchmark[FlexProgram, Sequence[FlexResult]]):
    """waits: how long new processes wait for results, too, which takes a quarter of a minute for each
    program.
    """

    stem: ClassVar[str] = "flex"
    waits: bool = True

    @property
    def cells(self) -> Sequence[FlexProgram]:
        return [FlexProgram(name) for name in MODS]

    def describe(self, cell: FlexProgram) -> str:
        return cell.name

    def measure(self, cells: Sequence[FlexProgram], rounds: int, report: Report) -> Sequence[FlexResult]:
        results = []
        for cell in cells:
            report(cell.name)
            first = {who: first_results(who, cell.name) for who in (OURS, TORCH)} if self.waits else {}
            torch.compiler.reset()
            found = _Programs().measure_cell(cell, rounds).timings
            small = {who: call(who, cell.name, SMALL, small=True) for who in (OURS, TORCH)}
            forward, both = (
                {who: found[name] for who in (OURS, TRITON, TORCH) if (name := f"{who} {phase}") in found}
                for phase in ("forward", "both")
            )
            results.append(
                FlexResult(
                    cell.name,
                    target_of_call(cell.name),
                    forward=forward,
                    both=both,
                    first=first,
                    host=measure_calls(small, rounds, lambda _: None),
                )
            )
        return results

    def page(self, results: Sequence[FlexResult], machine: Mapping[str, str]) -> Page:
        ran = {**machine, "target": ", ".join(sorted({result.target for result in results}))}
        data = {"format": 1, "machine": ran, "results": [asdict(result) for result in results]}
        return Page(markdown=markdown(results, ran), data=data)


def first_results(who: str, name: str) -> list[float]:
    """Seconds until the result of each of `LENGTHS`, in a new process with empty caches."""
    with tempfile.TemporaryDirectory(dir=own_folder()) as folder:
        caches = ("ATTNC_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        places = {variable: str(Path(folder, variable.lower())) for variable in caches}
        command = module_command("attnc.bench.flex_programs", who, name)
        done = subprocess.run(
            command, env={**os.environ, **places}, capture_output=True, text=True, check=True
        )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def markdown(results: Sequence[FlexResult], machine: Mapping[str, str]) -> str:
    return document(
        [ran_on(machine)],
        [
            f"B {B}, H {H}, D {D}, M = N = {LENGTH}, bf16. ms: medians of one interleaved run.",
            f"first s: until the first result (length {LENGTHS[0]}) in a new process with empty caches;",
            f"lengths s: of lengths {LENGTHS[1]} and {LENGTHS[2]} after that, block masks included.",
            "host us: microseconds for a call.",
        ],
        table(["", *_COLUMNS], map(_row, results)),
    )


def _row(result: FlexResult) -> list[str]:
    cells = [result.name, result.target]
    for timed in (result.forward, result.both):
        ours, theirs = timed.get(OURS), timed.get(TORCH)
        columns = (ours, timed.get(TRITON, ours), theirs)
        cells += [figure(timing.median if timing else None, ".3f") for timing in columns]
        cells.append(ratio(ours, theirs) if ours and theirs else "")
    first, host = result.first, result.host
    cells += [f"{first[who][0]:.1f}" if who in first else "" for who in (OURS, TORCH)]
    cells += [" + ".join(f"{s:.2f}" for s in first[who][1:]) if who in first else "" for who in (OURS, TORCH)]
    cells += [f"{host[who]:.0f}" if who in host else "" for who in (OURS, TORCH)]
    return cells
