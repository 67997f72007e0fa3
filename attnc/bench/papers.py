"""`attnc bench --papers`: what the FlashAttention papers argue about, measured.

Standard attention (eager PyTorch), and one kernel family in both loop orders with both splits of a tile among
warps, all of the same tiles: time, and the bytes through global, shared and device memory, as the plan
predicts them and as Nsight Compute counts them.

    python -m attnc.bench.papers CELL ...      launches everything once, for Nsight Compute to watch
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attnc.bench.cells import Cell, draw, standard
from attnc.bench.peers import PEERS, Unavailable
from attnc.build import front, plan_program
from attnc.plan import ir
from attnc.plan.device import DEVICES
from attnc.plan.picture import picture
from attnc.plan.traffic import device_memory, traffic
from attnc.runtime.loader import load_module
from attnc.runtime.timing import Launch, interleave

#: Candidate -> what it is.
ORDERS: Mapping[str, str] = {
    "eager": "standard attention",
    "fa1_split_k": "FA1 order, split-K",
    "fa1_split_q": "FA1 order, split-Q",
    "fa2_split_k": "FA2 order, split-K",
    "fa2_split_q": "FA2 order, split-Q",
}
CELLS: tuple[Cell, ...] = tuple(
    cell for cell in standard() if cell.mask == "full" and cell.width in (64, 128) and cell.length <= 4096
)
_SPEC = Path(__file__).parent / "specs" / "papers" / "warp_split.attn"
_BYTES = "smsp__sass_data_bytes_mem_{}.sum"
_SHARED = tuple(_BYTES.format(f"shared_op_{op}") for op in ("ld", "ldsm", "st"))
_GLOBAL, _COPIED = _BYTES.format("global"), _BYTES.format("global_op_ldgsts")
_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Of one launch: asked of and given to global memory; through device memory; through shared memory. None:
    not known.
    """

    asked: int | None
    device: int | None
    shared: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate on one cell: milliseconds, TFLOP/s, and bytes."""

    cell: str
    candidate: str
    ms: float
    tflops: float
    predicted: Bytes | None
    counted: Bytes | None


def measure(cells: Sequence[Cell], rounds: int, report: Callable[[str], None]) -> tuple[Row, ...]:
    """Times all candidates of every cell taking turns, then counts their bytes, where ncu is installed."""
    timings = {}
    for cell in cells:
        report(cell.name)
        timings[cell.name] = interleave(launches(cell), rounds)
        torch.cuda.empty_cache()
    counted = _count([(name, list(found)) for name, found in timings.items()])
    return tuple(
        Row(
            cell=cell.name,
            candidate=name,
            ms=timing.median,
            tflops=cell.flops / timing.median * 1e-9,
            predicted=predict(cell, name),
            counted=counted.get((cell.name, name)),
        )
        for cell in cells
        for name, timing in timings[cell.name].items()
    )


def launches(cell: Cell) -> dict[str, Launch]:
    """By candidate; those that can run the cell."""
    x = draw(cell)
    found: dict[str, Launch] = {}
    for name in ORDERS:
        try:
            found[name] = PEERS["eager"].make(cell, x) if name == "eager" else _ours(cell, name, x)
        except Unavailable:
            continue
    return found


def predict(cell: Cell, candidate: str) -> Bytes | None:
    """What the plan says; of standard attention, that the scores are written and read three times."""
    heads, length = cell.batch * cell.heads, cell.length
    if candidate == "eager":
        tensors = 4 * length * cell.width
        return Bytes(asked=None, device=2 * heads * (tensors + 6 * length**2), shared=None)
    kernel = _planned(cell, candidate).kernels[0]
    layout, config = kernel.cuda, kernel.configs[0]
    if layout is None:
        raise ValueError(f"{kernel.name} has no layout")
    tiles = picture(kernel, length, length, _size(config["tile.q"]), _size(config["tile.kv"]))
    moved = traffic(kernel, layout, config, tiles).times(heads)
    memory = device_memory(kernel, layout, config, tiles, heads, _device())
    return Bytes(asked=moved.moved, device=memory.read + memory.written, shared=moved.shared)


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


def read_counts(text: str, cells: Sequence[tuple[str, Sequence[str]]]) -> dict[tuple[str, str], Bytes]:
    """Bytes by cell and candidate from ncu's CSV. `cells`: the candidates that were launched, in order; one
    launch of theirs is one kernel, of standard attention several.
    """
    kernels: dict[str, dict[str, int]] = {}
    names: dict[str, str] = {}
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    for entry in csv.DictReader(lines[start:]):
        names[entry["ID"]] = entry["Kernel Name"]
        value = float(entry["Metric Value"].replace(",", "")) * _UNITS[entry["Metric Unit"]]
        kernels.setdefault(entry["ID"], {})[entry["Metric Name"]] = round(value)
    found: dict[tuple[str, str], Bytes] = {}
    queue = list(kernels)
    for cell, candidates in cells:
        for candidate in candidates:
            taken = 0
            if candidate == "eager":
                while taken < len(queue) and not names[queue[taken]].startswith(("fa1_", "fa2_")):
                    taken += 1
            else:
                taken = 1
            mine, queue = [kernels[number] for number in queue[:taken]], queue[taken:]
            found[cell, candidate] = _sum(mine, is_ours=candidate != "eager")
    return found


def main(names: Sequence[str]) -> None:
    """Launches every candidate of the cells once, between marks for the profiler."""
    profiler: Any = torch.cuda.profiler  # torch ships it without annotations
    for cell in (cell for cell in CELLS if cell.name in names):
        for launch in launches(cell).values():
            launch()
            torch.cuda.synchronize()
            profiler.start()
            launch()
            torch.cuda.synchronize()
            profiler.stop()


def _count(cells: Sequence[tuple[str, Sequence[str]]]) -> dict[tuple[str, str], Bytes]:
    ncu = shutil.which("ncu")
    if ncu is None:
        return {}
    metrics = ",".join((_READ, _WRITTEN, _GLOBAL, _COPIED, *_SHARED))
    command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--metrics", metrics]
    command += [sys.executable, "-m", "attnc.bench.papers", *(name for name, _ in cells)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    return read_counts(done.stdout, cells) if done.returncode == 0 else {}


def _sum(kernels: Sequence[Mapping[str, int]], *, is_ours: bool) -> Bytes:
    def total(*metrics: str) -> int:
        return sum(kernel.get(metric, 0) for kernel in kernels for metric in metrics)

    return Bytes(
        asked=total(_GLOBAL) if is_ours else None,
        device=total(_READ, _WRITTEN),
        # What cp.async brings is counted where it comes from.
        shared=total(*_SHARED, _COPIED) if is_ours else None,
    )


def _ours(cell: Cell, name: str, x: Any) -> Launch:
    kernel = getattr(_loaded(cell.width, name), name)
    return lambda: kernel(x.q, x.k, x.v)


@cache
def _loaded(width: int, name: str) -> ModuleType:
    return load_module(_modules()[name, width])


def _planned(cell: Cell, name: str) -> ir.Module:
    return _modules()[name, cell.width]


@cache
def _modules() -> dict[tuple[str, int], ir.Module]:
    return {
        (module.variant.attention.name, _size(module.variant.params["D"])): module
        for module in plan_program(front(_SPEC)).modules
    }


def _device() -> Any:
    major, minor = torch.cuda.get_device_capability()
    return DEVICES.get(f"sm_{major}{minor}", DEVICES["sm_80"])


def _size(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value!r} is not a size")
    return value


def _gb(found: Bytes | None, name: str) -> str:
    value = None if found is None else getattr(found, name)
    return "n/a" if value is None else f"{value * 1e-9:.2f}"


_UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "": 1}


def _plot(rows: Sequence[Row], device: str, path: Path) -> bool:
    """Time, device memory and shared memory of each candidate, a group of bars for each cell."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return False
    cells = list(dict.fromkeys(row.cell for row in rows))
    figure, panels = plt.subplots(1, 3, figsize=(13, 1.5 + 1.1 * len(cells)), sharey=True)
    panes = tuple(_panes())
    height = 0.8 / len(ORDERS)
    for axes, (title, value) in zip(panels, panes, strict=True):
        for i, name in enumerate(ORDERS):
            mine = {row.cell: value(row) for row in rows if row.candidate == name}
            places = [n + i * height for n in range(len(cells))]
            axes.barh(places, [mine.get(cell, 0.0) for cell in cells], height, label=ORDERS[name])
        axes.set_xlabel(title)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks([n + 0.4 - height / 2 for n in range(len(cells))], cells)
    panels[0].invert_yaxis()
    figure.suptitle(f"One attention, five ways to compute it: bf16, {device}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=len(ORDERS))
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def _panes() -> Iterator[tuple[str, Callable[[Row], float]]]:
    yield "milliseconds", lambda row: row.ms
    for name, title in (("device", "device memory"), ("shared", "shared memory")):

        def value(row: Row, name: str = name) -> float:
            found = row.counted or row.predicted
            return 1e-9 * ((getattr(found, name) if found else None) or 0)

        yield f"GB through {title}", value


if __name__ == "__main__":
    main(sys.argv[1:])
