"""Tables of `attnc bench --ranks`, from its JSON alone: a run that was cut off has its part of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PHASES = ("forward", "forward + backward")


def markdown(path: Path) -> str:
    """The file as tables."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return "\n".join(_lines(data))


def write_tables(path: Path) -> Path:
    """ranks.md beside the JSON."""
    table = path.with_suffix(".md")
    table.write_text(markdown(path) + "\n", encoding="utf-8")
    return table


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    parts, ranks = data["parts"], data["ranks"]
    ours = {name.partition(": ")[2]: part for name, part in parts.items() if name.startswith("attnc: ")}
    for phase in PHASES:
        yield f"### {phase}, {ranks} GPUs"
        yield ""
        yield f"| call | one GPU | {ranks} GPUs | efficiency | TFLOP/s a GPU | best peer | of the best peer |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        for cell, part in ours.items():
            if f"T{ranks} {phase}" in part:
                yield _row(cell, part, phase, ranks, _peers(parts, cell, f"T{ranks} {phase}"))
        yield ""
    yield from _facts(ours)
    yield from _planning(parts.get("planning", {}))
    yield from _failures(parts)
    if "links" in parts:
        yield "### Links, GB/s"
        yield ""
        yield from (f"- {name}: {_listed(value)}" for name, value in parts["links"].items())


def _peers(parts: Mapping[str, Any], cell: str, key: str) -> dict[str, float]:
    found = {}
    for name, part in parts.items():
        peer, _, of = name.partition(": ")
        if of == cell and peer != "attnc" and key in part:
            found[peer] = float(part[key])
    return found


def _row(cell: str, part: Mapping[str, Any], phase: str, ranks: int, peers: Mapping[str, float]) -> str:
    many = part[f"T{ranks} {phase}"]
    one = part.get(f"T1 {phase}")
    flops = part["flops"] * (1.0 if phase == "forward" else 3.5)
    best = min(peers, key=lambda name: peers[name], default="")
    cells = [
        cell,
        "-" if one is None else f"{one:.3f} ms",
        f"{many:.3f} ms",
        "-" if one is None else f"{100 * one / (ranks * many):.1f} %",
        f"{flops / many * 1e-9 / ranks:.0f}",
        f"{best} {peers[best]:.3f} ms" if best else "none can",
        f"{peers[best] / many:.2f}x" if best else "-",
    ]
    return f"| {' | '.join(cells)} |"


def _facts(ours: Mapping[str, Any]) -> Iterator[str]:
    yield "### Plans"
    yield ""
    yield "| call | strategy | parts | owners | imbalance | moved | same bits | largest difference |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for cell, part in ours.items():
        if "strategy" in part:
            moved = f"{part['bytes'] / 1e6:.1f} MB"
            cells = [
                cell,
                part["strategy"],
                part["groups"],
                part["owners"],
                f"{part['imbalance']:.3f}",
                moved,
            ]
            cells += [part.get("same_bits", "-"), part.get("largest_difference", "-")]
            yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    for cell, part in ours.items():
        if "speedup" in part:
            times = [
                f"{name} {x:.4f} ms"
                for name, x in part.items()
                if name.startswith("T") and isinstance(x, float)
            ]
            yield f"{cell}, a token: {', '.join(times)}; {part['speedup']:.2f} times as fast as one GPU"
            yield ""


def _planning(planned: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    if planned:
        ranks = list(next(iter(planned.values())))
        yield "### Planning, milliseconds of the host"
        yield ""
        yield f"| call | {' | '.join(f'{n} ranks, {16 * int(n)} chunks' for n in ranks)} |"
        yield f"| --- |{' --- |' * len(ranks)}"
        for cell, times in planned.items():
            yield f"| {cell} | {' | '.join(f'{times[n]:.2f}' for n in ranks)} |"
        yield ""


def _listed(value: object) -> str:
    """Several figures of one fact, `0 to 1 112.5, 1 to 0 385.7`."""
    return ", ".join(f"{name} {x}" for name, x in value.items()) if isinstance(value, dict) else str(value)


def _failures(parts: Mapping[str, Any]) -> Iterator[str]:
    failed = [(name, part["error"]) for name, part in parts.items() if "error" in part]
    if failed:
        yield "### What could not run"
        yield ""
        yield from (f"- {name}: {error}" for name, error in failed)
        yield ""
