"""What `attnc bench --papers` measured, as a table, as data and as a figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from attnc.bench.papers import ORDERS, Bytes, Row
from attnc.bench.plot import grouped_bars, pyplot, save


def write_papers(rows: Sequence[Row], folder: Path) -> tuple[Path, ...]:
    """Writes papers.md, papers.json and, where matplotlib is installed, papers.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table, data, plot = (folder / f"papers.{suffix}" for suffix in ("md", "json", "png"))
    table.write_text(markdown(rows), encoding="utf-8")
    device = torch.cuda.get_device_name()
    content = {"format": 1, "device": device, "rows": [asdict(row) for row in rows]}
    data.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return (table, data, plot) if _plot(rows, device, plot) else (table, data)


def read_papers(text: str) -> tuple[Row, ...]:
    """The rows of a papers.json."""

    def bytes_of(entry: Mapping[str, int | None] | None) -> Bytes | None:
        return None if entry is None else Bytes(**entry)

    return tuple(
        Row(**{**row, "predicted": bytes_of(row["predicted"]), "counted": bytes_of(row["counted"])})
        for row in json.loads(text)["rows"]
    )


def markdown(rows: Sequence[Row]) -> str:
    """A table; bytes in GB, predicted / counted."""
    head = ["cell", "kernel", "ms", "TFLOP/s", "global", "device memory", "shared"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        memories = (
            f"{_gb(row.predicted, name)} / {_gb(row.counted, name)}" for name in ("asked", "device", "shared")
        )
        cells = [row.cell, ORDERS[row.candidate], f"{row.ms:.3f}", f"{row.tflops:.0f}", *memories]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _gb(found: Bytes | None, name: str) -> str:
    value = None if found is None else getattr(found, name)
    return "n/a" if value is None else f"{value * 1e-9:.2f}"


def _plot(rows: Sequence[Row], device: str, path: Path) -> bool:
    """Time, device memory and shared memory of each candidate, a group of bars for each cell."""
    plt = pyplot()
    if plt is None:
        return False
    cells = list(dict.fromkeys(row.cell for row in rows))
    figure, panels = plt.subplots(1, 3, figsize=(13, 1.5 + 1.1 * len(cells)), sharey=True)
    for axes, (title, value) in zip(panels, _panes(), strict=True):
        found = {(row.candidate, row.cell): value(row) for row in rows}
        bars = {order: [found.get((name, cell), 0.0) for cell in cells] for name, order in ORDERS.items()}
        grouped_bars(axes, cells, bars)
        axes.set_xlabel(title)
    figure.suptitle(f"One attention, five ways to compute it: bf16, {device}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=len(ORDERS))
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    save(plt, figure, path)
    return True


def _panes() -> Iterator[tuple[str, Callable[[Row], float]]]:
    yield "milliseconds", lambda row: row.ms
    for name, title in (("device", "device memory"), ("shared", "shared memory")):

        def value(row: Row, name: str = name) -> float:
            found = row.counted or row.predicted
            return 1e-9 * ((getattr(found, name) if found else None) or 0)

        yield f"GB through {title}", value
