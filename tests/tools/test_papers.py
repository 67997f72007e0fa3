"""Predictions of the benchmark of the papers, and its reading of what Nsight Compute prints."""

from __future__ import annotations

import csv
import io

from tools.bench.papers import CELLS, ORDERS, Bytes, Row, markdown, predict, read_counts

COUNTS = (
    ("1", "gemm", {"dram__bytes_read.sum": "3.50"}, "Mbyte"),
    ("2", "softmax_warp_forward", {"dram__bytes_write.sum": "1,000,000"}, "byte"),
    ("3", "fa1_split_k_forward", {"dram__bytes_read.sum": "7"}, "byte"),
    (
        "4",
        "fa1_split_q_forward",
        {
            "smsp__sass_data_bytes_mem_global.sum": "10",
            "smsp__sass_data_bytes_mem_global_op_ldgsts.sum": "4",
            "smsp__sass_data_bytes_mem_shared_op_ldsm.sum": "30",
        },
        "byte",
    ),
    ("5", "fa1_split_k_forward", {"dram__bytes_read.sum": "8"}, "byte"),
)


def printed() -> str:
    """What ncu --csv prints, after some lines of its own."""
    out = io.StringIO()
    write = csv.writer(out, quoting=csv.QUOTE_ALL).writerow
    write(("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"))
    for number, kernel, metrics, unit in COUNTS:
        for metric, value in metrics.items():
            write((number, kernel, metric, unit, value))
    return f"==PROF== Connected to process 7\n{out.getvalue()}"


def test_counts_belong_to_cell_and_candidate() -> None:
    found = read_counts(printed(), [("x", ["eager", "fa1_split_k", "fa1_split_q"]), ("y", ["fa1_split_k"])])
    assert found["x", "eager"] == Bytes(asked=None, device=4_500_000, shared=None)
    assert found["x", "fa1_split_k"] == Bytes(asked=0, device=7, shared=0)
    assert found["x", "fa1_split_q"] == Bytes(asked=10, device=0, shared=34)
    assert found["y", "fa1_split_k"].device == 8


def test_the_table() -> None:
    known, unknown = Bytes(asked=2 * 10**9, device=10**9, shared=3 * 10**9), None
    row = Row(cell="c", candidate="fa2_split_q", ms=1.5, tflops=300, predicted=known, counted=unknown)
    expected = "| c | FA2 order, split-Q | 1.500 | 300 | 2.00 / n/a | 1.00 / n/a | 3.00 / n/a |"
    assert markdown([row]).splitlines()[2] == expected
    assert all(len(line.split("|")) == 9 for line in markdown([row]).splitlines())


def test_standard_attention_is_predicted_from_its_scores() -> None:
    assert {name.split("_")[0] for name in ORDERS} == {"eager", "fa1", "fa2"}
    assert {cell.width for cell in CELLS} == {64, 128}
    cell = CELLS[0]
    eager = predict(cell, "eager")
    assert eager is not None
    scores = cell.batch * cell.heads * cell.length**2
    assert eager.device == 2 * (6 * scores + 4 * cell.batch * cell.heads * cell.length * cell.width)
