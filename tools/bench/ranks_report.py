"""Tables and a picture of `attnc bench --ranks`, from its JSON alone: a run that was cut off has its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attnc.bench.report import grouped_bars, table

PHASES = ("forward", "forward + backward")


def markdown(data: Mapping[str, Any]) -> str:
    """Returns what a run wrote as JSON, as tables."""
    return "\n".join(_lines(data)) + "\n"


def draw_plot(data: Mapping[str, Any], plt: Any) -> Any:
    """Draws TFLOP/s of a GPU as bars, a panel for each phase: alone, sharing rows, and the peers."""
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
    return figure


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    parts, ranks = data["parts"], data["ranks"]
    ours = _ours(parts)
    for phase in PHASES:
        yield f"### {phase}, {ranks} GPUs"
        yield ""
        head = [
            "call",
            "one GPU",
            f"{ranks} GPUs",
            "efficiency",
            "of the slowest",
            "TFLOP/s a GPU",
            "best peer",
            "of the best peer",
        ]
        rows = list(_rows(parts, phase, ranks))
        column = head.index("of the slowest")
        if all(row[column] == "-" for row in rows):  # runs before it was measured
            for row in (head, *rows):
                del row[column]
        yield from table(head, rows)
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
    return {name.partition(": ")[2]: part for name, part in parts.items() if name.startswith("attnc: ")}


def _of_peers(parts: Mapping[str, Any], cell: str) -> dict[str, Mapping[str, Any]]:
    every = ((*name.partition(": ")[::2], part) for name, part in parts.items())
    return {peer: part for peer, of, part in every if of == cell and peer != "attnc"}


def _flops(part: Mapping[str, Any], phase: str) -> float:
    return 1e-9 * float(part["flops"]) * (1.0 if phase == "forward" else 3.5)


def _rows(parts: Mapping[str, Any], phase: str, ranks: int) -> Iterator[list[str]]:
    key = f"T{ranks} {phase}"
    for cell, part in _ours(parts).items():
        if key in part:
            best = {name: float(x[key]) for name, x in _of_peers(parts, cell).items() if key in x}
            yield _row(cell, part, phase, ranks, best)
            if key in part.get("copied", {}):
                yield _row(f"{cell}, copied", {**part, **part["copied"]}, phase, ranks, best)


def _row(cell: str, part: Mapping[str, Any], phase: str, ranks: int, peers: Mapping[str, float]) -> list[str]:
    many = part[f"T{ranks} {phase}"]
    one, slowest = part.get(f"T1 {phase}"), part.get(f"T1 slowest {phase}")
    best = min(peers, key=lambda name: peers[name], default="")
    return [
        cell,
        "-" if one is None else f"{one:.3f} ms",
        f"{many:.3f} ms",
        "-" if one is None else f"{100 * one / (ranks * many):.1f} %",
        "-" if slowest is None else f"{100 * slowest / (ranks * many):.1f} %",
        f"{_flops(part, phase) / many / ranks:.0f}",
        f"{best} {peers[best]:.3f} ms" if best else "none can",
        f"{peers[best] / many:.2f}x" if best else "-",
    ]


def _peers(parts: Mapping[str, Any], ours: Mapping[str, Any], ranks: int) -> Iterator[str]:
    cells = [cell for cell in ours if _of_peers(parts, cell)]
    names = list(dict.fromkeys(name for cell in cells for name in _of_peers(parts, cell)))
    if not names:
        return
    yield "### Peers, milliseconds: forward / forward + backward"
    yield ""
    reasons: list[str] = []
    rows = []
    for name in names:
        row = [name]
        for cell in cells:
            part = _of_peers(parts, cell).get(name, {})
            reason = part.get("error", "")
            if reason and reason not in reasons:
                reasons.append(reason)
            times = " / ".join(f"{part[key]:.2f}" for phase in PHASES if (key := f"T{ranks} {phase}") in part)
            row.append(f"no ({reasons.index(reason) + 1})" if reason else times or "-")
        rows.append(row)
    yield from table(["peer", *cells], rows)
    yield ""
    yield from (f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    yield ""


def _facts(ours: Mapping[str, Any]) -> Iterator[str]:
    yield "### Plans"
    yield ""
    head = ("call", "strategy", "parts", "owners", "imbalance", "moved", "of least", "bits of o", "gradients")
    copied = {f"{cell}, copied": part["copied"] for cell, part in ours.items() if "copied" in part}
    parts = {**ours, **copied}.items()
    yield from table(head, (_plan(cell, part) for cell, part in parts if "strategy" in part))
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


def _plan(cell: str, part: Mapping[str, Any]) -> list[object]:
    least, far = part.get("least_bytes"), part.get("gradients_differ")  # over the largest element of any
    return [
        cell,
        part["strategy"],
        part["groups"],
        part["owners"],
        f"{part['imbalance']:.3f}",
        f"{part['bytes'] / 1e6:.1f} MB",
        f"{part['bytes'] / least:.2f}x" if least else "-",
        part.get("same_bits", "-"),
        "-" if far is None else f"{far:.0e} apart",
    ]


def _planning(planned: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    if planned:
        ranks = list(next(iter(planned.values())))
        yield "### Planning, milliseconds of the host"
        yield ""
        yield from table(
            ["call", *(f"{n} ranks, {16 * int(n)} chunks" for n in ranks)],
            ([cell, *(f"{times[n]:.2f}" for n in ranks)] for cell, times in planned.items()),
        )
        yield ""


def _listed(value: object) -> str:
    """Returns several figures of one fact, `0 to 1 112.5, 1 to 0 385.7`."""
    return ", ".join(f"{name} {x}" for name, x in value.items()) if isinstance(value, dict) else str(value)


def _failures(parts: Mapping[str, Any]) -> Iterator[str]:
    """Yields parts that broke as a whole; what a peer cannot run is in its table."""
    failed = [(name, part["error"]) for name, part in parts.items() if "error" in part]
    failed = [(name, error) for name, error in failed if ": " not in name or name.startswith("attnc: ")]
    if failed:
        yield "### What did not end"
        yield ""
        yield from (f"- {name}: {error}" for name, error in failed)
        yield ""
