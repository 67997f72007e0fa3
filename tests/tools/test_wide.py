"""What tools/bench/wide.py times: texts that plan, FLOPs, and its table."""

import pytest

from tools.bench.wide import CELLS, TARGETS, Cell, candidates, kernel_text, row

CAUSAL = Cell(batch=2, heads=16, kv_heads=16, length=4096, causal=True)
SHARED = Cell(batch=1, heads=16, kv_heads=2, length=4096, causal=False)
LONG = Cell(batch=1, heads=16, kv_heads=16, length=16384, causal=True)


def test_the_spec_holds_both_masks() -> None:
    assert kernel_text(True).count("mask = causal") == kernel_text(False).count("mask = true") == 2
    assert "mask = causal" not in kernel_text(False)


def test_flops_are_those_of_kept_elements() -> None:
    elements = 2 * 16 * 4096 * 4096
    assert CAUSAL.flops(2) == 2 * elements * (512 + 512) / 2
    assert CAUSAL.flops(5) == 2.5 * CAUSAL.flops(2)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [(CAUSAL, (*TARGETS, "PyTorch")), (SHARED, TARGETS), (LONG, ("cuda.sm_90a",))],
    ids=lambda value: str(value) if isinstance(value, Cell) else "",
)
def test_peers_run_where_they_can(cell: Cell, expected: tuple[str, ...]) -> None:
    assert tuple(candidates(cell, dict.fromkeys(TARGETS, lambda *_: None))) == expected


def test_one_kernel_runs_alone() -> None:
    assert tuple(candidates(CAUSAL, {"cuda.sm_90a": lambda *_: None})) == ("cuda.sm_90a",)


def test_a_row_names_the_best_peer_s_share() -> None:
    columns = (*TARGETS, "PyTorch")
    speeds = {"cuda.sm_90a": 527.4, "triton": 72.0, "PyTorch": 151.0}
    assert row(SHARED, "forward", speeds, columns) == (
        "| b1 h16/2 n4096 full | forward | 527 | 72 | 151 | 3.4x |"
    )
    assert row(LONG, "gradients", {"cuda.sm_90a": 250.0}, columns).endswith("| 250 | n/a | n/a | n/a |")


def test_cells_cover_both_masks_and_groups() -> None:
    assert {(cell.causal, cell.kv_heads) for cell in CELLS} == {
        (c, h) for c in (False, True) for h in (2, 16)
    }
