"""`attnc bench --papers`: what the FlashAttention papers argue about, measured.

Standard attention (eager PyTorch), and one kernel family in both loop orders with both splits of a tile among
warps, all of the same tiles: time, and the bytes through global, shared and device memory, as the plan
predicts them and as Nsight Compute counts them.

    python -m tools.bench.papers CELL ...      launches everything once, for Nsight Compute to watch
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from attnc.bench.cells import Cell, Inputs, draw, standard
from attnc.bench.peers import PEERS, Peer
from attnc.bench.report import Page, document, grouped_bars, table
from attnc.bench.run import Benchmark, Contest, Report, Unavailable
from attnc.build import front, plan_program
from attnc.plan import ir
from attnc.plan.device import DEVICES
from attnc.plan.picture import picture
from attnc.plan.targets import target_of
from attnc.runtime.children import module_command
from attnc.runtime.loader import load_module
from attnc.runtime.timing import Launch

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
_SPEC = Path(__file__).parent / "specs" / "warp_split.attn"
_BYTES = "smsp__sass_data_bytes_mem_{}.sum"
_SHARED = tuple(_BYTES.format(f"shared_op_{op}") for op in ("ld", "ldsm", "st"))
_GLOBAL, _COPIED = _BYTES.format("global"), _BYTES.format("global_op_ldgsts")
_UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "": 1}
_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes that one launch moves: asked of and given to global memory; through device memory; through shared
    memory. None: not known.
    """

    asked: int | None
    device: int | None
    shared: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A candidate on a cell: milliseconds, TFLOP/s, and bytes."""

    cell: str
    candidate: str
    ms: float
    tflops: float
    predicted: Bytes | None
    counted: Bytes | None


def order_launch(name: str, cell: Cell, x: Inputs) -> Launch:
    """Returns a launch of one of `ORDERS`."""
    if name == "eager":
        return PEERS["eager"].make(cell, x)
    kernel = getattr(_loaded(cell.width, name), name)
    return lambda: kernel(x.q, x.k, x.v)


class _Orders(Contest[Cell, Inputs]):
    """All of `ORDERS` on every cell."""

    def candidates(self, cell: Cell) -> Sequence[Peer]:
        made = ((name, title, partial(order_launch, name)) for name, title in ORDERS.items())
        return [Peer(name=name, title=title, make=make) for name, title, make in made]

    def draw(self, cell: Cell, copies: int) -> Sequence[Inputs]:
        return [draw(cell) for _ in range(copies)]


class PapersBenchmark(Benchmark[Cell, Sequence[Row]]):
    """Times of all candidates, then their bytes, counted where ncu is installed."""

    stem: ClassVar[str] = "papers"

    @property
    def cells(self) -> Sequence[Cell]:
        return CELLS

    def describe(self, cell: Cell) -> str:
        return cell.describe("forward")

    def measure(self, cells: Sequence[Cell], rounds: int, report: Report) -> Sequence[Row]:
        results = _Orders().measure(cells, rounds, report)
        counted = _count([(result.cell.name, list(result.timings)) for result in results])
        return [
            Row(
                cell=result.cell.name,
                candidate=name,
                ms=timing.median,
                tflops=result.cell.flops / timing.median * 1e-9,
                predicted=predict(result.cell, name),
                counted=counted.get((result.cell.name, name)),
            )
            for result in results
            for name, timing in result.timings.items()
        ]

    def page(self, results: Sequence[Row], machine: Mapping[str, str]) -> Page:
        device = machine["device"]
        data = {"format": 1, "device": device, "rows": [asdict(row) for row in results]}
        return Page(markdown=markdown(results), data=data, draw=partial(_draw, results, device))


def predict(cell: Cell, candidate: str) -> Bytes | None:
    """Returns what the plan says; of standard attention, that the scores are written and read three times."""
    heads, length = cell.batch * cell.heads, cell.length
    if candidate == "eager":
        tensors = 4 * length * cell.width
        return Bytes(asked=None, device=2 * heads * (tensors + 6 * length**2), shared=None)
    module = _planned(cell, candidate)
    kernel = module.kernel
    config = kernel.configs[0]
    tiles = picture(kernel, length, length, config.tile_q, config.tile_kv)
    counted = target_of(module.target).traffic(kernel, config, tiles, heads, _device())
    if counted is None:
        raise ValueError(f"what {kernel.name} moves is not known")
    moved, memory = counted
    return Bytes(asked=moved.moved, device=memory.read + memory.written, shared=moved.shared)


def read_counts(text: str, cells: Sequence[tuple[str, Sequence[str]]]) -> dict[tuple[str, str], Bytes]:
    """Returns bytes by cell and candidate from ncu's CSV. cells: the candidates that were launched, in order;
    one launch of theirs is one kernel, of standard attention several.
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
        x = draw(cell)
        for name in ORDERS:
            try:
                launch = order_launch(name, cell, x)
            except Unavailable:
                continue
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
    command += module_command("tools.bench.papers", *(name for name, _ in cells))
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


def markdown(rows: Sequence[Row]) -> str:
    """Returns a table; bytes in GB, predicted / counted."""
    head = ["cell", "kernel", "ms", "TFLOP/s", "global", "device memory", "shared"]
    memories = ("asked", "device", "shared")
    return document(
        table(
            head,
            (
                (
                    row.cell,
                    ORDERS[row.candidate],
                    f"{row.ms:.3f}",
                    f"{row.tflops:.0f}",
                    *(f"{_gb(row.predicted, name)} / {_gb(row.counted, name)}" for name in memories),
                )
                for row in rows
            ),
        )
    )


def _gb(found: Bytes | None, name: str) -> str:
    value = None if found is None else getattr(found, name)
    return "n/a" if value is None else f"{value * 1e-9:.2f}"


def _draw(rows: Sequence[Row], device: str, plt: Any) -> Any:
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
    return figure


def _panes() -> Iterator[tuple[str, Callable[[Row], float]]]:
    yield "milliseconds", lambda row: row.ms
    for name, title in (("device", "device memory"), ("shared", "shared memory")):

        def value(row: Row, name: str = name) -> float:
            found = row.counted or row.predicted
            return 1e-9 * ((getattr(found, name) if found else None) or 0)

        yield f"GB through {title}", value


if __name__ == "__main__":
    main(sys.argv[1:])
