"""The decode cells, a kernel for each way to read them, and the table."""

import json
import pickle

import pytest
import torch

from attnc.bench.decode import (
    CALLS,
    NAMES,
    NARROW,
    NARROW_PAGES,
    PAGED,
    PAGES,
    SPEC,
    DecodeBenchmark,
    DecodeCell,
    DecodeInputs,
    decode_cells,
    decoders,
    scaling_cells,
)
from attnc.bench.run import ROTATED, Result, Unavailable
from attnc.bench.serving import SPEC as SERVING
from attnc.bench.serving import serving_candidates, serving_cells, serving_figures, serving_table
from attnc.runtime.timing import Timing
from tests.plans import plans_of
from tests.targets import TARGETS

MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0"}


def timing(milliseconds: float) -> Timing:
    return Timing(median=milliseconds, low=milliseconds * 0.99, high=milliseconds * 1.01, samples=15)


def test_the_cells_are_the_documented_ones() -> None:
    cells = decode_cells()
    assert [cell.bytes for cell in cells] == [2**25, 2**29, 2**25, 2**29, 2**31, 2**31, 2**28]
    assert len({cell.name for cell in (*cells, *scaling_cells())}) == 10
    copies = [DecodeBenchmark(peers=()).copies(cell) for cell in cells]
    assert all(n * cell.bytes >= ROTATED and n >= 2 for n, cell in zip(copies, cells, strict=True))


@pytest.mark.parametrize("target", TARGETS)
def test_every_generated_candidate_has_a_kernel(target: str) -> None:
    planned = (module for module in plans_of(SPEC).modules if module.target == target)
    made = {module.variant.attention.name for module in planned}
    assert made == {
        "dense",
        "unified",
        *PAGED.values(),
        *([NARROW, NARROW_PAGES] if target == "triton" else []),
    }
    assert [x.name for x in decoders((), target)] == ["attnc", "paged", "unified"]


def test_an_attention_without_a_schedule_for_the_target_is_a_gap() -> None:
    (_, _, unified) = decoders((), "cuda.sm_90a")
    with pytest.raises(Unavailable, match=r"no schedule for cuda\.sm_90a"):
        unified.make(decode_cells()[0], None)  # type: ignore[arg-type]  # it has no kernel to look at it


def test_those_take_part_that_are_named() -> None:
    found = decoders(["triton", "page_4", "fa2", "eager"], "cuda.sm_80")
    assert [x.name for x in found] == [
        "attnc", "paged", "page_4", "unified",
        "triton_attnc", "triton_paged", "triton_page_4", "triton_unified",
        "fa2",
    ]  # fmt: skip
    assert {"page 4", "page 4 on Triton"} < {x.title for x in found}
    assert all(x.ours == (x.name != "fa2") for x in found)
    assert len(decoders(NAMES, "cuda.sm_80")) == 2 * (len(PAGED) + 2) + 5 + 2
    assert len(decoders(NAMES, "triton")) == len(PAGED) + 2 + 5 + 2


def test_what_is_warmed_up_goes_to_other_processes() -> None:
    benchmark = DecodeBenchmark(peers=NAMES, target="cuda.sm_80")
    jobs = benchmark.jobs((*decode_cells(), *serving_cells()))
    assert len(jobs) == 7 * 16 + 2 * 2 + 2
    assert len(benchmark.jobs(scaling_cells()[:1])) == 15  # FlexAttention has no part there
    assert all(pickle.loads(pickle.dumps(job)) for job in jobs)


def test_a_cache_of_8_bits_has_half_the_bytes() -> None:
    cell = decode_cells()[0]
    timings = {name: timing(1.0) for name in ("attnc", "e4m3", "triton_e4m3")}
    page = DecodeBenchmark(peers=()).page([Result(cell=cell, timings=timings, missing={})], MACHINE)
    (found,) = page.data["cells"]
    speeds = {name: found["results"][name]["gb_s"] for name in timings}
    assert speeds["e4m3"] == speeds["triton_e4m3"] == pytest.approx(speeds["attnc"] / 2, abs=0.1)


def test_a_pool_is_read_in_pages_of_every_size() -> None:
    pool = torch.arange(64.0).reshape(64, 1, 1)
    tables = {page: torch.arange(64 // page)[None] for page in PAGES}
    x = DecodeInputs(q=pool, k=pool, v=pool, k_pool=pool, v_pool=pool, tables=tables, kv_len=pool)
    for page in PAGES:
        k, v, table = x.split_into_pages(page)
        assert k.shape == v.shape == (64 // page, page, 1, 1)
        assert torch.equal(k[table[0]].flatten(), pool.flatten())


def test_the_table_compares_with_the_best_peer() -> None:
    cell = DecodeCell(batch=1, heads=32, kv_heads=8, length=8192)
    times = {"attnc": 0.01, "paged": 0.0104, "unified": 0.0101, "cudnn": 0.02, "fa2": 0.03}
    timings = {name: timing(value) for name, value in times.items()}
    result = Result(cell=cell, timings=timings, missing={"flex": "no"})
    calls = Result(cell=CALLS, timings={"attnc": timing(0.0182)}, missing={})
    page = DecodeBenchmark(peers=NAMES - {"triton"}).page([result, calls], MACHINE)
    text = page.markdown
    row = next(line for line in text.splitlines() if line.startswith("| b1 "))
    assert row.split(" | ")[1:3] == ["10.0", "3355"]
    assert "2.00x cudnn | 0.962 |" in row
    assert "attnc 18.2" in text
    assert "* n/a for flex: no" in text
    data = json.loads(json.dumps(page.data))
    assert data["cells"][0]["results"]["cudnn"] == {"us": 20.0, "low": 19.8, "high": 20.2, "gb_s": 1677.7}
    assert data["eager_us"] == {"attnc": 18.2}


def test_further_cells_have_their_kernels_and_rooflines() -> None:
    cells = serving_cells()
    assert len({cell.name for cell in cells}) == len(cells)
    for target in TARGETS:
        planned = (module for module in plans_of(SERVING).modules if module.target == target)
        assert {module.variant.attention.name for module in planned} == {"mla", "verify", "shared", "own"}
        for cell in cells:
            first = serving_candidates(cell.kind, (), target)[0].name
            result = Result(cell=cell, timings={first: timing(1.0)}, missing={})
            assert "| 1000.0 |" in serving_table([result], target)
    mla = next(cell for cell in cells if cell.kind == "mla")
    assert mla.bytes == mla.length * 1152
    assert mla.roofline == pytest.approx(max(mla.bytes / 4.8e12, mla.flops / 989e12))


def test_further_cells_are_a_table_of_their_own() -> None:
    cell = serving_cells()[-1]
    times = {"cascade": timing(0.1), "plain": timing(0.25)}
    result = Result(cell=cell, timings=times, missing={})
    row = next(line for line in serving_table([result], "triton").splitlines() if line.startswith("| prefix"))
    assert "paged decode 250.0 (2.50x)" in row
    assert serving_figures(result)["results"]["cascade"]["us"] == 100.0
