"""What is measured: the cells, their FLOPs, and a spec for each."""

from pathlib import Path

import numpy as np
import pytest

import attnc.bench
from attnc.bench.cells import (
    DOCUMENT,
    PREFIX,
    TOKENS,
    WINDOW,
    Cell,
    Mask,
    extra,
    masks,
    quick,
    single,
    standard,
)
from attnc.plan.signature import feature
from tests.plans import plans_of
from tests.targets import TARGETS

SPECS = Path(attnc.bench.__file__).parent / "specs"


def test_the_standard_cells_hold_the_same_work() -> None:
    cells = standard()
    assert len(cells) == 18
    assert {cell.batch * cell.length for cell in cells} == {TOKENS}
    assert {cell.heads * cell.width for cell in cells} == {2048}
    assert len({cell.name for cell in (*cells, *masks(), *extra())}) == 31


def test_both_products_count_where_values_are_narrower() -> None:
    cell = Cell(mask="full", batch=2, heads=3, length=100, width=192, value=128)
    assert cell.name == "d192/128 h3 n100 full"
    assert cell.flops == 2 * 2 * 3 * 100 * 100 * (192 + 128)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mask", ["window512", "documents", "prefix", "causal", "full"])
def test_flops_count_what_the_mask_keeps(mask: Mask) -> None:
    n = 3000
    q, kv = np.arange(n)[:, None], np.arange(n)
    kept = {
        "full": np.ones((n, n), bool),
        "causal": kv <= q,
        "window512": (kv <= q) & (q - kv <= WINDOW),
        "documents": (q // DOCUMENT == kv // DOCUMENT) & (kv <= q),
        "prefix": (kv <= q) | (kv < PREFIX),
    }[mask].sum()
    cell = Cell(mask=mask, batch=1, heads=1, length=n, width=64)
    assert cell.kept == pytest.approx(kept, rel=2e-3)
    assert cell.flops == pytest.approx(4 * 64 * kept, rel=2e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", [*TARGETS, "cuda.sm_90a"])
def test_every_cell_has_a_generated_kernel(target: str) -> None:
    made = {
        (
            module.variant.attention.name,
            *(feature(x) for x in (module.variant.attention.q, module.variant.attention.v)),
        )
        for path in sorted(SPECS.glob("*.attn"))
        for module in plans_of(path).modules
        if module.target == target
    }
    wanted = (*standard(), *masks(), *quick(), *extra())
    assert {(cell.mask, cell.width, cell.value_width) for cell in wanted} <= made


@pytest.mark.parametrize(("name", "cells"), [("plain", standard()), ("single", single())])
def test_deterministic_kernels_are_there_for_the_plain_cells(name: str, cells: tuple[Cell, ...]) -> None:
    modules = [
        module
        for module in plans_of(SPECS / "deterministic" / f"{name}.attn").modules
        if module.target == "cuda.sm_80"
    ]
    made = {(module.variant.attention.name, module.variant.params["D"]) for module in modules}
    assert made == {(cell.mask, cell.width) for cell in cells}
    for module in modules:
        assert module.backward is not None
        width = module.variant.params["D"]
        of_keys = ["dv", "dk"] if (module.target, width) == ("cuda.sm_90a", 256) else ["dkdv"]
        assert [planned.kind for planned in module.backward.kernels] == ["dq", *of_keys]


def test_ordered_kernels_are_there_for_the_cells_that_have_them() -> None:
    modules = plans_of(SPECS / "ordered" / "plain.attn").modules
    made = {(module.variant.attention.name, module.variant.params["D"]) for module in modules}
    assert made == {(cell.mask, cell.width) for cell in standard() if cell.width <= 128}
    for module in modules:
        assert module.backward is not None
        (planned,) = module.backward.kernels
        assert planned.chain.adds_dq == "ordered"
