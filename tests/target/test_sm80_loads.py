"""What a step of a backward loads: of rows in arrays, of columns and elements where they are at hand."""

from __future__ import annotations

import pytest

from attnc.plan.layout import KernelName
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward import CudaBackwardText
from attnc.target.sm80.loads import Loads
from tests.plan.planning import planned

INPUTS = ("of_row: f32[H, M]", "of_column: f32[N]", "of_both: f32[M, N]")
SCORE = "dot(q, k) / 8 + of_row[h, q_idx] + of_column[kv_idx] + of_both[q_idx, kv_idx]"


def loads_of(kernel: KernelName, mask: str = "true") -> Loads:
    module = planned(mask, score=SCORE, inputs=INPUTS, target="cuda.sm_80", grads="q, k, v")
    return CudaBackwardText(module, ArgumentText(module), module.backward_kernels[kernel]).loads


@pytest.mark.parametrize(
    ("kernel", "row", "column"), [("dq", "of_row", "of_column"), ("dkdv", "of_column", "of_row")]
)
def test_rows_are_those_of_the_kernels_own_tile(kernel: KernelName, row: str, column: str) -> None:
    loads = loads_of(kernel)
    assert [fetch.load.tensor for fetch in loads.row_fetches] == [row]
    assert [fetch.load.tensor for fetch in loads.columns] == [column]
    (fetch,) = loads.row_fetches
    assert loads.row_array(fetch) == f"float {fetch.name}[ROWS];"
    assert loads.row_value(fetch).startswith(f"{fetch.name}[r] = ")
    assert any("of_both" in line for line in loads.element_values)


def test_what_a_mask_alone_reads_of_an_element_is_loaded_for_it() -> None:
    module = planned(
        "of_both[q_idx, kv_idx] > 0",
        inputs=("of_both: i32[M, N]",),
        target="cuda.sm_80",
        grads="q, k, v",
    )
    for kernel in module.backward_kernels.values():
        loads = CudaBackwardText(module, ArgumentText(module), kernel).loads
        assert not any("of_both" in line for line in loads.element_values)
        assert any("of_both" in line for line in loads.element_mask_values)
