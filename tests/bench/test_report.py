"""The table, the JSON, and gaps in both."""

import json
from dataclasses import replace

import pytest

from attnc.bench.cells import Cell
from attnc.bench.peers import PEERS
from attnc.bench.report import as_json, markdown
from attnc.bench.run import Result, best_peer, candidates
from attnc.runtime.timing import Timing

MACHINE = {"device": "NVIDIA H200", "attnc": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"}
CELL = Cell(mask="full", batch=4, heads=16, length=4096, width=128)


def timing(tflops: float) -> Timing:
    ms = CELL.flops / tflops * 1e-9
    return Timing(median=ms, low=0.99 * ms, high=1.01 * ms, samples=15)


RESULT = Result(
    cell=CELL,
    timings={"attnc": timing(500), "flex": timing(400), "cudnn": timing(600)},
    flushed={"attnc": timing(480), "flex": timing(390), "cudnn": timing(400)},
    missing={"fa2": "only full and causal"},
    ceiling=750.0,
)


def test_the_table() -> None:
    lines = markdown([RESULT], candidates(["cudnn", "fa2", "flex"]), MACHINE).splitlines()
    assert lines[0] == "NVIDIA H200; attnc 0.1.0, torch 2.11.0, triton 3.6.0."
    head = ["forward, bf16", "attnc", "spread", "cuDNN", "FlashAttention-2", "FlexAttention"]
    rest = "to the best | of matmul | attnc, flushed | to the best, flushed"
    assert lines[5] == f"| {' | '.join(head)} | {rest} |"
    row = "| d128 h16 n4096 full | 500 | 2.0 % | 600 | n/a | 400 | 0.83x cudnn | 67 % | 480 | 1.20x cudnn |"
    assert lines[7] == row
    assert lines[-1] == "* n/a for fa2: only full and causal"


def test_a_backward_counts_as_two_and_a_half_forwards() -> None:
    result = replace(RESULT, phase="backward")
    lines = markdown([result], candidates(["cudnn", "flex"]), MACHINE).splitlines()
    assert lines[5].startswith("| backward, bf16 | attnc |")
    assert lines[7].startswith("| d128 h16 n4096 full | 1250 |")
    data = json.loads(as_json([result], MACHINE))
    assert data["phase"] == "backward"
    assert data["cells"][0]["flops"] == 2.5 * CELL.flops


def test_a_table_without_our_kernel() -> None:
    broken = Result(cell=CELL, timings={"flex": timing(400)}, missing={"attnc": "no variant"}, ceiling=750.0)
    row = markdown([broken], candidates(["flex"]), MACHINE).splitlines()[7]
    assert row == "| d128 h16 n4096 full | n/a | n/a | 400 | n/a | n/a | n/a | n/a |"


def test_json_holds_all_figures() -> None:
    data = json.loads(as_json([RESULT], MACHINE))
    (cell,) = data["cells"]
    assert cell["results"]["attnc"]["tflops"] == 500.0
    assert cell["results"]["attnc"]["flushed"]["ms"] == pytest.approx(CELL.flops / 480e9, rel=1e-4)
    assert cell["missing"] == {"fa2": "only full and causal"}
    assert cell["matmul_tflops"] == 750.0


def test_the_best_peer_is_not_ourselves() -> None:
    assert best_peer(RESULT.timings) == "cudnn"
    assert set(PEERS) == {"cudnn", "fa2", "fa3", "fa4", "efficient", "flex", "eager"}
