"""The further cells of decoding on the clock, and their table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attnc.bench.decode_run import Job, take_turns
from attnc.bench.serving import MEMORY, ServingCell, draw_serving
from attnc.bench.serving_peers import PEERS, contenders
from attnc.runtime.timing import Timing

TITLES = {
    "attnc": "attnc",
    "cascade": "cascade",
    "plain": "paged decode",
    "cudnn": "cuDNN",
    "fa2": "FA2",
    "products": "two products and a softmax",
    "bare": "two products",
    "triton": "attnc on Triton",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResult:
    """Milliseconds of a step by candidate, and why others are missing."""

    cell: ServingCell
    timings: Mapping[str, Timing]
    missing: Mapping[str, str]

    @property
    def ours(self) -> Timing | None:
        return self.timings.get("cascade" if self.cell.kind == "prefix" else "attnc")


def measure_serving(
    cells: Sequence[ServingCell],
    peers: Collection[str],
    target: str,
    rounds: int,
    report: Callable[[str], None],
) -> tuple[ServingResult, ...]:
    """Times every cell. `report` is called with the name of each before it starts."""
    results = []
    for cell in cells:
        report(cell.name)
        known = contenders(cell.kind, target)
        makers = {name: make for name, make in known.items() if name not in PEERS or name in peers}
        with torch.no_grad():
            copies = draw_serving(cell, cell.copies)
            timings, missing = take_turns(copies, makers, cell.bytes, rounds)
        results.append(ServingResult(cell=cell, timings=timings, missing=missing))
        del copies
        torch.cuda.empty_cache()
    return tuple(results)


def serving_jobs(cells: Sequence[ServingCell], target: str) -> list[Job]:
    """What to warm up: one cell of each kind, as no length or batch compiles a kernel anew."""
    first = {cell.kind: cell for cell in reversed(cells)}
    return [partial(_launch_once, cell, target) for cell in first.values()]


def _launch_once(cell: ServingCell, target: str) -> None:
    (x,) = draw_serving(cell, 1)
    known = contenders(cell.kind, target)
    for name in ("attnc", "cascade", "plain"):
        make = known.get(name)
        try:
            with torch.no_grad():
                if make is not None:
                    make(x)()
            torch.cuda.synchronize()
        except Exception:  # the measurement meets the same failure and reports it
            return


def serving_markdown(results: Sequence[ServingResult]) -> str:
    """Microseconds of all candidates, and how ours compares with memory's speed and with the roofline."""
    head = ("cell", "us", "GB/s", "TFLOP/s", "of roofline", "others, us")
    rows = [head, ("---",) * len(head), *map(_row, results)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    reasons = sorted({f"{r.cell.kind}, {name}: {why}" for r in results for name, why in r.missing.items()})
    return "\n".join([*lines, "", *(f"* n/a for {reason}" for reason in reasons)]).rstrip() + "\n"


def _row(result: ServingResult) -> tuple[str, ...]:
    cell, mine = result.cell, result.ours
    if mine is None:
        return (cell.name, "n/a", "n/a", "n/a", "n/a", "n/a")
    seconds = mine.median * 1e-3
    others = (
        f"{TITLES[name]} {timing.median * 1e3:.1f} ({timing.median / mine.median:.2f}x)"
        for name, timing in result.timings.items()
        if timing is not mine
    )
    return (
        cell.name,
        f"{seconds * 1e6:.1f}",
        f"{cell.bytes / seconds * 1e-9:.0f}",
        f"{cell.flops / seconds * 1e-12:.0f}",
        f"{100 * cell.roofline / seconds:.0f} %",
        ", ".join(others) or "n/a",
    )


def serving_dict(results: Sequence[ServingResult]) -> list[dict[str, Any]]:
    """All figures: microseconds with quantiles, and why a candidate is missing."""
    return [
        {
            "name": result.cell.name,
            "bytes": result.cell.bytes,
            "flops": result.cell.flops,
            "roofline_us": round(result.cell.roofline * 1e6, 3),
            "memory_us": round(result.cell.bytes / MEMORY * 1e6, 3),
            "results": {name: timing.microseconds() for name, timing in result.timings.items()},
            "missing": dict(result.missing),
        }
        for result in results
    ]
