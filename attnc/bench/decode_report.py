"""Decode results as Markdown, JSON and a plot, written to a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnc.bench.decode_peers import Decoder
from attnc.bench.decode_run import DecodeResult
from attnc.bench.plot import grouped_bars, pyplot, save
from attnc.bench.report import ran_on
from attnc.bench.serving_run import ServingResult, serving_dict, serving_markdown


def write_decode(
    results: Sequence[DecodeResult],
    eager: Mapping[str, float],
    decoders: Sequence[Decoder],
    serving: Sequence[ServingResult],
    machine: Mapping[str, str],
    folder: Path,
) -> tuple[Path, ...]:
    """Writes decode.md, decode.json and, where matplotlib is installed, decode.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table, data, plot = (folder / f"decode.{ending}" for ending in ("md", "json", "png"))
    text = f"{markdown(results, eager, decoders, machine)}\n{serving_markdown(serving)}"
    table.write_text(text, encoding="utf-8")
    data.write_text(as_json(results, eager, serving, machine), encoding="utf-8")
    if results and draw_plot(results, decoders, plot, machine["device"]):
        return (table, data, plot)
    return (table, data)


def markdown(
    results: Sequence[DecodeResult],
    eager: Mapping[str, float],
    decoders: Sequence[Decoder],
    machine: Mapping[str, str],
) -> str:
    """GB/s of K and V of every candidate, ratios to the best peer and of pages to a tensor, and what a call
    costs the host.
    """
    titles = [decoder.title for decoder in decoders]
    head = ["decode, bf16, d128", "us", *titles, "to the best", "pages to tensor", "spread"]
    lines = [
        ran_on(machine),
        "",
        (
            "Medians of interleaved rounds in GB/s of K and V, under CUDA graph replay with a cold L2; "
            "spread is the width of the middle 80 % of the samples."
        ),
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for result in results:
        mine = result.timings.get("attnc")
        row = [
            result.cell.name,
            f"{mine.median * 1e3:.1f}" if mine else "n/a",
            *(_figure(result.speed(decoder.name)) for decoder in decoders),
            _ratio(result, "attnc", result.best_peer(), named=True),
            _ratio(result, "paged", "attnc"),
            f"{100 * mine.spread:.1f} %" if mine else "n/a",
        ]
        lines.append(f"| {' | '.join(row)} |")
    calls = ", ".join(f"{d.title} {eager[d.name]:.1f}" for d in decoders if d.name in eager)
    lines += ["", f"Microseconds of the host for an eager call: {calls}."]
    reasons = sorted({f"{name}: {reason}" for r in results for name, reason in r.missing.items()})
    lines += ["", *(f"* n/a for {reason}" for reason in reasons)]
    return "\n".join(lines).rstrip() + "\n"


def as_json(
    results: Sequence[DecodeResult],
    eager: Mapping[str, float],
    serving: Sequence[ServingResult],
    machine: Mapping[str, str],
) -> str:
    """All figures: microseconds with quantiles, GB/s, and why a candidate is missing."""
    cells = [
        {
            "name": result.cell.name,
            "bytes": result.cell.bytes,
            "results": {
                name: {
                    **timing.microseconds(),
                    "gb_s": round(result.speed(name) or 0.0, 1),
                }
                for name, timing in result.timings.items()
            },
            "missing": dict(result.missing),
        }
        for result in results
    ]
    calls = {name: round(microseconds, 2) for name, microseconds in eager.items()}
    more = serving_dict(serving)
    data = {"format": 1, "machine": dict(machine), "cells": cells, "serving": more, "eager_us": calls}
    return json.dumps(data, indent=2) + "\n"


def _figure(speed: float | None) -> str:
    return "n/a" if speed is None else f"{speed:.0f}"


def _ratio(result: DecodeResult, name: str, other: str | None, *, named: bool = False) -> str:
    mine, theirs = result.speed(name), None if other is None else result.speed(other)
    if not mine or not theirs:
        return "n/a"
    return f"{mine / theirs:.2f}x {other}" if named else f"{mine / theirs:.3f}"


def draw_plot(results: Sequence[DecodeResult], decoders: Sequence[Decoder], path: Path, device: str) -> bool:
    """Horizontal bars, a group for each cell, beside the time of one sequence over its length; False where
    matplotlib is missing.
    """
    plt = pyplot()
    if plt is None:
        return False
    figure, (bars, growth) = plt.subplots(1, 2, figsize=(12, 1 + 0.75 * len(results)), width_ratios=(3, 2))
    speeds = {decoder.title: [r.speed(decoder.name) or 0.0 for r in results] for decoder in decoders}
    grouped_bars(bars, [r.cell.name for r in results], speeds)
    bars.margins(y=0.01)
    bars.set_xlabel("GB/s of K and V (longer is faster)")
    bars.set_title(f"Decode, bf16, {device}")
    _growth(growth, results, decoders)
    growth.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save(plt, figure, path)
    return True


def _growth(axes: Any, results: Sequence[DecodeResult], decoders: Sequence[Decoder]) -> None:
    """Microseconds of a single sequence over its length."""
    single = sorted((r for r in results if r.cell.batch == 1), key=lambda r: r.cell.length)
    for decoder in decoders:
        points = [
            (r.cell.length, r.timings[decoder.name].median * 1e3) for r in single if decoder.name in r.timings
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=decoder.title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("keys")
    axes.set_ylabel("microseconds, batch 1")
    axes.legend(loc="upper left", fontsize="small")
