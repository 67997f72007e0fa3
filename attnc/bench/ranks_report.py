"""Tables and a picture of `attnc bench --ranks`, from its JSON alone: a run that was cut off has its part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attnc.bench.plot import grouped_bars, pyplot, save

PHASES = ("forward", "forward + backward")


def markdown(path: Path) -> str:
    """The file as tables."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return "\n".join(_lines(data))


def write_tables(path: Path) -> tuple[Path, ...]:
    """ranks.md beside the JSON and, where matplotlib is installed, ranks.png; returns their paths."""
    table, plot = path.with_suffix(".md"), path.with_suffix(".png")
    table.write_text(markdown(path) + "\n", encoding="utf-8")
    return (table, plot) if draw_plot(path, plot) else (table,)


def draw_plot(data_path: Path, path: Path) -> bool:
    """TFLOP/s of a GPU as bars, a panel for each phase: alone, sharing rows, and the peers; False where
    matplotlib is missing.
    """
    plt = pyplot()
    if plt is None:
        return False
    data = json.loads(data_path.read_text(encoding="utf-8"))
    parts, ranks = data["parts"], data["ranks"]
    ours = {name: part for name, part in _ours(parts).items() if "flops" in part}
    peers = list(dict.fromkeys(name for cell in ours for name in _of_peers(parts, cell)))
    figure, panels = plt.subplots(1, 2, figsize=(12, 1.5 + 0.9 * len(ours)), sharey=True)
    series: dict[str, list[float]] = {}
    for axes, phase in zip(panels, PHASES, strict=True):
        key = f"T{ranks} {phase}"

        def rates(times: Mapping[str, float], gpus: int, phase: str = phase) -> list[float]:
            return [_flops(ours[cell], phase) / x / gpus if (x := times.get(cell)) else 0.0 for cell in ours]

        alone = {cell: part.get(f"T1 {phase}", 0.0) for cell, part in ours.items()}
        mine = {cell: part.get(key, 0.0) for cell, part in ours.items()}
        series = {"one GPU": rates(alone, 1), f"each of {ranks}": rates(mine, ranks)}
        copied = {cell: part.get("copied", {}).get(key, 0.0) for cell, part in ours.items()}
        if any(copied.values()):
            series[f"each of {ranks}, copied"] = rates(copied, ranks)
        for name in peers:
            times = {cell: _of_peers(parts, cell).get(name, {}).get(key, 0.0) for cell in ours}
            series[name] = rates(times, ranks)
        grouped_bars(axes, list(ours), series)
        axes.set_xlabel("TFLOP/s of a GPU (longer is faster; none: it cannot run that)")
        axes.set_title(phase)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="lower center", ncols=len(series), frameon=False, fontsize="small")
    figure.suptitle(f"{ranks} {data['machine'].get('device', 'GPUs')}, bf16")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    save(plt, figure, path)
    return True


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    parts, ranks = data["parts"], data["ranks"]
    ours = _ours(parts)
    for phase in PHASES:
        yield f"### {phase}, {ranks} GPUs"
        yield ""
        yield f"| call | one GPU | {ranks} GPUs | efficiency | TFLOP/s a GPU | best peer | of the best peer |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        for cell, part in ours.items():
            if f"T{ranks} {phase}" in part:
                times = {name: x for name, x in _of_peers(parts, cell).items() if f"T{ranks} {phase}" in x}
                best = {name: float(x[f"T{ranks} {phase}"]) for name, x in times.items()}
                yield _row(cell, part, phase, ranks, best)
                if f"T{ranks} {phase}" in part.get(
                    "copied", {}
                ):  # out of symmetric memory
                    yield _row(f"{cell}, copied", {**part, **part["copied"]}, phase, ranks, best)
        yield ""
    yield from _facts(ours)
    yield from _peers(parts, ours, ranks)
    yield from _planning(parts.get("planning", {}))
    yield from _failures(parts)
    if "links" in parts:
        yield "### Links, GB/s"
        yield ""
        yield from (f"- {name}: {_listed(value)}" for name, value in parts["links"].items())


def _ours(parts: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By cell."""
    return {name.partition(": ")[2]: part for name, part in parts.items() if name.startswith("attnc: ")}


def _of_peers(parts: Mapping[str, Any], cell: str) -> dict[str, Mapping[str, Any]]:
    """What each peer has of a cell: times, or an error."""
    every = ((*name.partition(": ")[::2], part) for name, part in parts.items())
    return {peer: part for peer, of, part in every if of == cell and peer != "attnc"}


def _flops(part: Mapping[str, Any], phase: str) -> float:
    """Operations of a call in units of 1e9, which are TFLOP/s over milliseconds."""
    return 1e-9 * float(part["flops"]) * (1.0 if phase == "forward" else 3.5)


def _row(cell: str, part: Mapping[str, Any], phase: str, ranks: int, peers: Mapping[str, float]) -> str:
    many = part[f"T{ranks} {phase}"]
    one = part.get(f"T1 {phase}")
    best = min(peers, key=lambda name: peers[name], default="")
    cells = [
        cell,
        "-" if one is None else f"{one:.3f} ms",
        f"{many:.3f} ms",
        "-" if one is None else f"{100 * one / (ranks * many):.1f} %",
        f"{_flops(part, phase) / many / ranks:.0f}",
        f"{best} {peers[best]:.3f} ms" if best else "none can",
        f"{peers[best] / many:.2f}x" if best else "-",
    ]
    return f"| {' | '.join(cells)} |"


def _peers(parts: Mapping[str, Any], ours: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Milliseconds of every peer, and a number for the reason why it has none."""
    cells = [cell for cell in ours if _of_peers(parts, cell)]
    names = list(dict.fromkeys(name for cell in cells for name in _of_peers(parts, cell)))
    if not names:
        return
    yield "### Peers, milliseconds: forward / forward + backward"
    yield ""
    yield f"| peer | {' | '.join(cells)} |"
    yield f"| --- |{' --- |' * len(cells)}"
    reasons: list[str] = []
    for name in names:
        row = []
        for cell in cells:
            part = _of_peers(parts, cell).get(name, {})
            reason = part.get("error", "")
            if reason and reason not in reasons:
                reasons.append(reason)
            times = " / ".join(f"{part[key]:.2f}" for phase in PHASES if (key := f"T{ranks} {phase}") in part)
            row.append(f"no ({reasons.index(reason) + 1})" if reason else times or "-")
        yield f"| {name} | {' | '.join(row)} |"
    yield ""
    yield from (f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    yield ""


def _facts(ours: Mapping[str, Any]) -> Iterator[str]:
    yield "### Plans"
    yield ""
    yield "| call | strategy | parts | owners | imbalance | moved | of the least | same bits | difference |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    copied = {f"{cell}, copied": part["copied"] for cell, part in ours.items() if "copied" in part}
    for cell, part in (*ours.items(), *copied.items()):
        if "strategy" in part:
            moved, least = f"{part['bytes'] / 1e6:.1f} MB", part.get("least_bytes")
            cells = [
                cell,
                part["strategy"],
                part["groups"],
                part["owners"],
                f"{part['imbalance']:.3f}",
                moved,
                f"{part['bytes'] / least:.2f}x" if least else "-",
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
    """Parts as a whole that broke; what a peer cannot run is in its table."""
    failed = [(name, part["error"]) for name, part in parts.items() if "error" in part]
    failed = [(name, error) for name, error in failed if ": " not in name or name.startswith("attnc: ")]
    if failed:
        yield "### What did not end"
        yield ""
        yield from (f"- {name}: {error}" for name, error in failed)
        yield ""
