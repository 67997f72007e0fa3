"""Forward and backward: the table, the JSON, and gaps in both."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attnc.bench.attention import AttentionBenchmark
from attnc.bench.cells import Cell, Phase
from attnc.bench.peers import PEERS
from attnc.bench.report import Page, fastest
from attnc.bench.run import Result
from attnc.runtime.timing import Timing

MACHINE = {"device": "NVIDIA H200", "attnc": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"}
CELL = Cell(mask="full", batch=4, heads=16, length=4096, width=128)


def timing(tflops: float) -> Timing:
    ms = CELL.flops / tflops * 1e-9
    return Timing(median=ms, low=0.99 * ms, high=1.01 * ms, samples=15)


#: Of the multiplication of matrices: 750 TFLOP/s.
MATMUL = Timing(median=2 * 8192**3 / 750e9, low=1.0, high=2.0, samples=15)
RESULT = Result(
    cell=CELL,
    timings={"attnc": timing(500), "flex": timing(400), "cudnn": timing(600), "matmul": MATMUL},
    flushed={"attnc": timing(480), "flex": timing(390), "cudnn": timing(400)},
    missing={"fa2": "only full and causal"},
)


def written(result: Result[Cell], *peers: str, phase: Phase = "forward") -> Page:
    return AttentionBenchmark(offered=(CELL,), peers=peers, phase=phase).page([result], MACHINE)


def test_the_table() -> None:
    lines = written(RESULT, "cudnn", "fa2", "flex").markdown.splitlines()
    assert lines[0] == "NVIDIA H200; attnc 0.1.0, torch 2.11.0, triton 3.6.0."
    head = ["forward, bf16", "attnc", "spread", "cuDNN", "FlashAttention-2", "FlexAttention"]
    rest = "to the best | of matmul | attnc, flushed | to the best, flushed"
    assert lines[5] == f"| {' | '.join(head)} | {rest} |"
    row = "| d128 h16 n4096 full | 500 | 2.0 % | 600 | n/a | 400 | 0.83x cudnn | 67 % | 480 | 1.20x cudnn |"
    assert lines[7] == row
    assert lines[-1] == "* n/a for fa2: only full and causal"


def test_a_backward_counts_as_two_and_a_half_forwards() -> None:
    page = written(RESULT, "cudnn", "flex", phase="backward")
    lines = page.markdown.splitlines()
    assert lines[5].startswith("| backward, bf16 | attnc |")
    assert lines[7].startswith("| d128 h16 n4096 full | 1250 |")
    data = page.data
    assert data["phase"] == "backward"
    assert data["cells"][0]["flops"] == 2.5 * CELL.flops


def test_a_table_without_our_kernel() -> None:
    timings = {"flex": timing(400), "matmul": MATMUL}
    broken = Result(cell=CELL, timings=timings, missing={"attnc": "no variant"})
    row = written(broken, "flex").markdown.splitlines()[7]
    assert row == "| d128 h16 n4096 full | n/a | n/a | 400 | n/a | n/a | n/a | n/a |"


def test_the_best_peer_is_of_a_library() -> None:
    """Other kernels of attnc's have columns, but nobody asks how far it is behind itself."""
    own = {"triton": timing(700), "ordered": timing(800)}
    result = replace(RESULT, timings={**RESULT.timings, **own}, flushed={**RESULT.flushed, **own})
    row = written(result, "triton", "ordered", "cudnn", "flex", phase="backward").markdown.splitlines()[7]
    assert [cell.strip() for cell in row.split("|")[4:8]] == ["1750", "2000", "1500", "1000"]
    assert [cell for cell in row.split("|") if "x " in cell] == [" 0.83x cudnn ", " 1.20x cudnn "]


def test_json_holds_all_figures(tmp_path: Path) -> None:
    table, data, *plot = written(RESULT, "cudnn", "fa2", "flex").write(tmp_path / "new", "bench")
    assert table.read_text(encoding="utf-8").startswith("NVIDIA H200; ")
    assert [made.stat().st_size > 1000 for made in plot] in ([], [True])  # without matplotlib, and with it
    (cell,) = json.loads(data.read_text(encoding="utf-8"))["cells"]
    assert set(cell["results"]) == {"attnc", "flex", "cudnn"}
    assert cell["results"]["attnc"]["tflops"] == 500.0
    assert cell["results"]["attnc"]["flushed"]["ms"] == pytest.approx(CELL.flops / 480e9, rel=1e-4)
    assert cell["missing"] == {"fa2": "only full and causal"}
    assert cell["matmul_tflops"] == 750.0


def test_json_is_for_any_program(tmp_path: Path) -> None:
    """Python would write `Infinity`."""
    page = Page(markdown="", data={"error": float("inf"), "rows": [(0.5, float("nan"))]})
    _, data = page.write(tmp_path, "bench")
    assert json.loads(data.read_text(encoding="utf-8")) == {"error": None, "rows": [[0.5, None]]}


def test_the_best_peer_is_not_ourselves() -> None:
    assert fastest(RESULT.timings, ["flex", "fa2", "cudnn"]) == "cudnn"
    assert set(PEERS) == {"cudnn", "fa2", "fa3", "fa4", "efficient", "flex", "eager"}
