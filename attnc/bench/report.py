"""Results as Markdown, JSON and a plot, written to a folder."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import attnc
from attnc.bench.cells import Phase
from attnc.bench.peers import Peer
from attnc.bench.plot import grouped_bars, pyplot, save
from attnc.bench.run import Result, best_peer
from attnc.runtime.timing import Timing


def machine(target: str) -> dict[str, str]:
    """What the figures depend on, and whose kernels were timed."""
    import triton

    cudnn: Any = torch.backends.cudnn  # torch ships it without annotations
    return {
        "device": torch.cuda.get_device_name(),
        "attnc": attnc.__version__,
        "torch": torch.__version__,
        "triton": str(triton.__version__),
        "cudnn": str(cudnn.version()),
        "python": platform.python_version(),
        "target": target,
    }


def ran_on(machine: Mapping[str, str]) -> str:
    """The same as a sentence."""
    software = ", ".join(f"{name} {version}" for name, version in machine.items() if name != "device")
    return f"{machine['device']}; {software}."


def write_report(
    results: Sequence[Result], peers: Sequence[Peer], machine: dict[str, str], folder: Path
) -> tuple[Path, ...]:
    """Writes bench.md, bench.json and, where matplotlib is installed, bench.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table, data = folder / "bench.md", folder / "bench.json"
    table.write_text(markdown(results, peers, machine), encoding="utf-8")
    data.write_text(as_json(results, machine), encoding="utf-8")
    plot = folder / "bench.png"
    return (table, data, plot) if _plot(results, peers, plot, machine["device"]) else (table, data)


def phase_of(results: Sequence[Result]) -> Phase:
    """What a run timed."""
    return results[0].phase if results else "forward"


def _dtype(results: Sequence[Result]) -> str:
    return results[0].cell.dtype if results else "bf16"


def markdown(results: Sequence[Result], peers: Sequence[Peer], machine: dict[str, str]) -> str:
    """TFLOP/s of every candidate with its spread, attnc's ratio to the best peer and share of the matmul
    ceiling.
    """
    ours, others = peers[0], peers[1:]
    phase = phase_of(results)
    head = [
        f"{phase}, {_dtype(results)}",
        ours.title,
        "spread",
        *(peer.title for peer in others),
        "to the best",
        "of matmul",
        f"{ours.title}, flushed",
        "to the best, flushed",
    ]
    lines = [
        ran_on(machine),
        "",
        "Medians of interleaved rounds in TFLOP/s; spread is the width of the middle 80 % of the samples.",
        "Launches of a sample follow one another; flushed: one at a time, nothing of its inputs in L2.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for result in results:
        mine, flushed = result.tflops(ours.name), result.flushed.get(ours.name)
        row = [
            result.cell.name,
            _figure(mine),
            f"{100 * result.timings[ours.name].spread:.1f} %" if mine else "n/a",
            *(_figure(result.tflops(peer.name)) for peer in others),
            _to_the_best(result.timings, ours.name),
            f"{100 * mine / result.ceiling:.0f} %" if mine else "n/a",
            f"{result.cell.flops_of(phase) / flushed.median * 1e-9:.0f}" if flushed else "n/a",
            _to_the_best(result.flushed, ours.name),
        ]
        lines.append(f"| {' | '.join(row)} |")
    reasons = sorted({f"{name}: {reason}" for r in results for name, reason in r.missing.items()})
    lines += ["", *(f"* n/a for {reason}" for reason in reasons)]
    return "\n".join(lines).rstrip() + "\n"


def as_json(results: Sequence[Result], machine: dict[str, str]) -> str:
    """All figures: milliseconds with quantiles, TFLOP/s, the ceiling, and why a candidate is missing."""
    cells = [
        {
            "name": result.cell.name,
            "flops": result.cell.flops_of(result.phase),
            "matmul_tflops": round(result.ceiling, 1),
            "results": {
                name: {
                    **_milliseconds(timing),
                    "tflops": round(result.tflops(name) or 0.0, 1),
                    **({"flushed": _milliseconds(result.flushed[name])} if name in result.flushed else {}),
                }
                for name, timing in result.timings.items()
            },
            "missing": dict(result.missing),
        }
        for result in results
    ]
    data = {"format": 1, "phase": phase_of(results), "machine": machine, "cells": cells}
    return json.dumps(data, indent=2) + "\n"


def _milliseconds(timing: Timing) -> dict[str, float]:
    figures = {"ms": timing.median, "low": timing.low, "high": timing.high}
    return {name: round(milliseconds, 5) for name, milliseconds in figures.items()}


def _to_the_best(timings: Mapping[str, Timing], ours: str) -> str:
    best = best_peer(timings)
    if best is None or ours not in timings:
        return "n/a"
    return f"{timings[best].median / timings[ours].median:.2f}x {best}"


def _figure(tflops: float | None) -> str:
    return "n/a" if tflops is None else f"{tflops:.0f}"


def _plot(results: Sequence[Result], peers: Sequence[Peer], path: Path, device: str) -> bool:
    """Horizontal bars, a group for each cell; False where matplotlib is missing."""
    plt = pyplot()
    if plt is None:
        return False
    figure, axes = plt.subplots(figsize=(9, 1 + 0.16 * len(peers) * len(results) + 0.2 * len(results)))
    speeds = {peer.title: [r.tflops(peer.name) or 0.0 for r in results] for peer in peers}
    grouped_bars(axes, [r.cell.name for r in results], speeds)
    axes.margins(y=0.01)
    axes.set_xlabel("TFLOP/s (longer is faster)")
    axes.set_title(f"Attention {phase_of(results)}, {_dtype(results)}, {device}")
    axes.legend(loc="lower right")
    figure.tight_layout()
    save(plt, figure, path)
    return True
