"""The cells of prompts: the same keys in every form, a kernel for each, and the table."""

import json
import pickle

import pytest
import torch

from attnc.bench.prefill import (
    FORMS,
    PAGES,
    SPEC,
    PrefillBenchmark,
    PrefillCell,
    draw_prefill,
    prefill_cells,
)
from attnc.bench.run import Result
from attnc.runtime.timing import Timing
from tests.plans import plans_of
from tests.targets import TARGETS

CELL = PrefillCell(lengths=(40, 1, 64))


def timing(milliseconds: float) -> Timing:
    return Timing(median=milliseconds, low=milliseconds, high=milliseconds, samples=15)


def test_the_cells_are_the_documented_ones() -> None:
    assert [cell.name for cell in prefill_cells()] == [
        "b16 n1024", "b4 n4096", "b1 n16384", "b16 n64 to 1984",
    ]  # fmt: skip
    assert [cell.is_equal for cell in prefill_cells()] == [True, True, True, False]
    assert PrefillCell(lengths=(10, 20)).flops == 4 * 32 * 128 * (10 * 10 + 20 * 20) / 2


@pytest.mark.parametrize("target", [*TARGETS, "cuda.sm_90a"])
def test_every_form_has_a_kernel(target: str) -> None:
    made = {m.variant.attention.name for m in plans_of(SPEC).modules if m.target == target}
    assert made == set(FORMS)


def test_pages_hold_the_keys_of_each_prompt() -> None:
    x = draw_prefill(CELL, "cpu")
    assert x.cu.tolist() == [0, 40, 41, 105]
    for page in PAGES:
        k, v, table = x.paged[page]
        for row, length in enumerate(CELL.lengths):
            for pool, packed in ((k, x.k), (v, x.v)):
                keys = pool[table[row].long()].flatten(0, 1)[:length]
                assert torch.equal(keys, packed[x.cu[row] : x.cu[row + 1]])


def test_prompts_of_one_length_lie_in_a_tensor() -> None:
    x = draw_prefill(PrefillCell(lengths=(8, 8)), "cpu")
    q, k, v = x.dense()
    assert q.shape == (2, 8, 32, 128)
    assert k.shape == v.shape == (2, 8, 8, 128)


def test_those_take_part_that_are_named() -> None:
    named = PrefillBenchmark(peers=["triton", "fa3", "cudnn"], target="cuda.sm_90a")
    assert [who.name.split()[0] for who in named.candidates(CELL)] == [
        *["attnc"] * 4, *["triton"] * 4, *["fa3"] * 4,
    ]  # fmt: skip
    small = PrefillBenchmark(peers=["page_1"], target="cuda.sm_90a")
    assert [who.name for who in small.candidates(CELL)][2:] == [
        "attnc page_16", "attnc page_64", "attnc page_1",
    ]  # fmt: skip
    alone = PrefillBenchmark(peers=["triton"], target="triton")
    assert {who.name.split()[0] for who in alone.candidates(CELL)} == {"attnc"}
    jobs = named.jobs(prefill_cells())
    assert len(jobs) == 4
    assert all(pickle.loads(pickle.dumps(job)) for job in jobs)


def test_the_table_compares_with_the_dense_kernel_and_with_the_same_form() -> None:
    times = {"attnc dense": 1.0, "attnc page_16": 1.25, "fa3 page_16": 1.5}
    timings = {name: timing(value) for name, value in times.items()}
    result = Result(cell=CELL, timings=timings, missing={"fa3 dense": "no"})
    page = PrefillBenchmark(peers=["fa3"]).page([result], {"device": "NVIDIA H200"})
    table = page.markdown
    assert "| b3 n1 to 64 | page 16 | 1250.0 | 0 | 0.0 % | 0.80x | 0 | 1.20x |" in table
    assert table.endswith("* n/a for FlashAttention-3, dense: no\n")
    (cell,) = json.loads(json.dumps(page.data))["cells"]
    assert cell["results"]["attnc page_16"]["us"] == 1250.0
