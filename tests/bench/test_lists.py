"""Attention over lists: what cells count, whom they reach, and what is written of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import attnc
from attnc.bench.list_cells import ListCell, draw_inputs, list_cells
from attnc.bench.list_peers import DENSE, OURS, PEERS, TRITON, _as_full_blocks, _invert, ours
from attnc.bench.lists import ListBenchmark, figures_of, share_of_dense
from attnc.bench.run import Result, Unavailable
from attnc.runtime.timing import Timing

CELL = ListCell(
    model="It", queries=64, keys=96, heads=4, kv_heads=2, width=16, value=16, rows=16, block=32, entries=2
)
MACHINE = {"device": "NVIDIA H200", "attnc": "0.1.0"}


def result(cell: ListCell, **ms: float) -> Result[ListCell]:
    times = {name: Timing(median=value, low=value, high=value, samples=5) for name, value in ms.items()}
    return Result(cell=cell, timings=times, missing={})


def test_cells_are_of_blocks_of_queries_with_blocks_and_of_tokens() -> None:
    cells = list_cells()
    assert len({cell.name for cell in cells}) == len(cells) >= 20
    assert {(cell.rows, cell.block) for cell in cells} >= {(64, 64), (128, 128), (1, 64), (1, 128), (1, 1)}
    assert {cell.heads for cell in cells if cell.latent} >= {8, 16, 64, 128}
    assert any(cell.job == "gradients" for cell in cells)
    assert any(cell.queries == 1 for cell in cells)


def test_what_lists_name_is_counted() -> None:
    assert CELL.visited == 64 * 2 * 32
    assert CELL.flops == 2 * 4 * (16 + 16) * CELL.visited
    assert replace(CELL, job="gradients").flops == 2.5 * CELL.flops
    causal = replace(CELL, causal=True, keys=64, block=16, entries=3)
    assert [causal.entries_of(at) for at in range(4)] == [1, 2, 3, 3]
    assert causal.visited == 16 * 16 * (1 + 2 + 3 + 3)


@pytest.mark.parametrize(
    "cell",
    [
        CELL,
        replace(CELL, causal=True, keys=64, block=16, entries=3),
        replace(CELL, causal=True, rows=1, block=16, keys=80, queries=16, entries=4),
        replace(CELL, rows=1, block=1, entries=24, shared=0.9),
    ],
)
def test_lists_name_blocks_once_and_none_that_is_later(cell: ListCell) -> None:
    idx = draw_inputs(cell, device="cpu").idx
    for at in range(cell.lists):
        for named in idx[:, :, at].flatten(0, 1).tolist():
            blocks = [block for block in named if block >= 0]
            assert len(set(blocks)) == len(blocks) == cell.entries_of(at)
            assert max(blocks) <= cell.last_block(at)
            assert not cell.causal or cell.last_block(at) in blocks


def test_neighbours_share_what_a_cell_says() -> None:
    cell = replace(CELL, rows=1, block=1, keys=2000, queries=40, entries=500)
    for shared, least, most in ((0.0, 0.15, 0.35), (0.9, 0.75, 0.97)):
        idx = draw_inputs(replace(cell, shared=shared), device="cpu").idx[0, 0].tolist()
        same = [len(set(one) & set(other)) / 500 for one, other in pairwise(idx)]
        assert least < sum(same) / len(same) < most


FORMS = {cell.form: cell for cell in list_cells()}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("cell", FORMS.values(), ids=lambda cell: cell.name)
def test_attnc_has_kernels_for_every_cell(cell: ListCell) -> None:
    for dense in (False, True):
        made = attnc.compile(cell.spec(dense=dense), target="triton")
        assert callable(made)


def test_lists_become_those_of_other_libraries() -> None:
    idx = draw_inputs(CELL, device="cpu").idx
    counts, full = _as_full_blocks(CELL, idx)
    assert counts.shape == (1, 4, 4)
    assert full.shape == (1, 4, 4, 3)
    of_keys, rows = _invert(CELL, idx.repeat_interleave(2, dim=1))
    pairs = {(h, at, int(b)) for h in range(4) for at in range(4) for b in full[0, h, at, : counts[0, h, at]]}
    inverted = {
        (h, int(at), b) for h in range(4) for b in range(3) for at in rows[0, h, b, : of_keys[0, h, b]]
    }
    assert pairs == inverted


@pytest.mark.parametrize(("name", "cell"), [
    ("flex", replace(CELL, rows=1)), ("flex", replace(CELL, causal=True, queries=96)), ("fa4", CELL),
    ("nsa", CELL), ("flashmla", CELL),
])  # fmt: skip
def test_peers_say_what_they_do_not_take(name: str, cell: ListCell) -> None:
    x = draw_inputs(cell, device="cpu")
    with pytest.raises(Unavailable):
        PEERS[name].make(cell, x)


def test_kernels_are_compiled_once_for_cells_that_share_them() -> None:
    benchmark = ListBenchmark(peers=[])
    cells = [CELL, replace(CELL, model="Another", batch=7, heads=8), replace(CELL, width=32)]
    assert len(benchmark.jobs(cells)) == 2 * len(ours())


def test_a_page_has_rates_beside_those_over_all_keys() -> None:
    made = result(CELL, **{OURS: 1.0, TRITON: 2.0, DENSE: 1.0, "flex": 1.5})
    assert share_of_dense(made) == pytest.approx(CELL.visited / (64 * 96))
    page = ListBenchmark(peers=["flex"]).page([made], MACHINE)
    assert "| 1.50x flex |" in page.markdown
    (cell,) = json.loads(json.dumps(page.data))["cells"]
    assert cell == figures_of(made)
    assert cell["results"]["flex"]["ms"] == 1.5
    assert cell["results"][DENSE]["tflops"] == round(CELL.kept_flops * 1e-9, 1)


def test_a_run_that_is_out_of_time_begins_no_other_cell() -> None:
    class Told(ListBenchmark):
        def measure_cell(self, cell: ListCell, rounds: int) -> Result[ListCell]:
            return result(cell, **{OURS: 1.0})

    times = iter([0.0, 50.0, 70.0])
    benchmark = Told(peers=[], seconds=60.0, clock=lambda: next(times))
    measured = benchmark.measure([CELL, CELL, CELL], 3, lambda name: None)
    assert [bool(result.timings) for result in measured] == [True, True, False]
    assert "no time was left" in benchmark.page(measured, MACHINE).markdown
    assert torch.is_grad_enabled()
