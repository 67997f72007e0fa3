"""The decode cells, a kernel for each way to read them, and the table."""

import json

import pytest

from attnc.bench.decode import ROTATED, DecodeCell, decode_cells, scaling_cells
from attnc.bench.decode_peers import DECODERS, SPEC
from attnc.bench.decode_report import as_json, markdown
from attnc.bench.decode_run import DecodeResult
from attnc.bench.serving import serving_cells
from attnc.bench.serving_peers import CONTENDERS
from attnc.bench.serving_peers import SPEC as SERVING
from attnc.bench.serving_run import ServingResult, serving_dict, serving_markdown
from attnc.build import front, plan_program
from attnc.runtime.timing import Timing

MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0"}


def timing(milliseconds: float) -> Timing:
    return Timing(median=milliseconds, low=milliseconds * 0.99, high=milliseconds * 1.01, samples=15)


def test_the_cells_are_the_documented_ones() -> None:
    cells = decode_cells()
    assert [cell.bytes for cell in cells] == [2**25, 2**29, 2**29, 2**31, 2**31, 2**28]
    assert len({cell.name for cell in (*cells, *scaling_cells())}) == 9
    assert all(cell.copies * cell.bytes >= ROTATED and cell.copies >= 2 for cell in cells)


def test_every_generated_candidate_has_a_kernel() -> None:
    made = {module.variant.attention.name for module in plan_program(front(SPEC)).modules}
    assert made == {"dense", "paged", "unified"}
    assert [decoder.name for decoder in DECODERS if decoder.ours] == ["attnc", "paged", "unified"]


def test_the_table_compares_with_the_best_peer() -> None:
    cell = DecodeCell(batch=1, heads=32, kv_heads=8, length=8192)
    times = {"attnc": 0.01, "paged": 0.0104, "unified": 0.0101, "cudnn": 0.02, "fa2": 0.03}
    result = DecodeResult(
        cell=cell,
        timings={name: timing(value) for name, value in times.items()},
        missing={"flex": "no"},
    )
    assert result.best_peer() == "cudnn"
    text = markdown([result], {"attnc": 18.2}, DECODERS, MACHINE)
    row = next(line for line in text.splitlines() if line.startswith("| b1 "))
    assert row.split(" | ")[1:3] == ["10.0", "3355"]
    assert "2.00x cudnn | 0.962 |" in row
    assert "attnc 18.2" in text
    assert "* n/a for flex: no" in text
    assert json.loads(as_json([result], {}, [], MACHINE))["cells"][0]["results"]["cudnn"]["us"] == 20.0


def test_further_cells_have_their_kernels_and_rooflines() -> None:
    cells = serving_cells()
    assert {cell.kind for cell in cells} == set(CONTENDERS)
    assert len({cell.name for cell in cells}) == len(cells)
    made = {module.variant.attention.name for module in plan_program(front(SERVING)).modules}
    assert made == {"mla", "verify", "shared", "own"}
    mla = next(cell for cell in cells if cell.kind == "mla")
    assert mla.bytes == 8192 * 1152
    assert mla.roofline == pytest.approx(max(mla.bytes / 4.8e12, mla.flops / 989e12))


def test_further_cells_are_a_table_of_their_own() -> None:
    cell = serving_cells()[-1]
    times = {"cascade": timing(0.1), "plain": timing(0.25)}
    result = ServingResult(cell=cell, timings=times, missing={})
    row = next(line for line in serving_markdown([result]).splitlines() if line.startswith("| prefix"))
    assert "paged decode 250.0 (2.50x)" in row
    assert serving_dict([result])[0]["results"]["cascade"]["us"] == 100.0
