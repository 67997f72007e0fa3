"""Which kernels a backward has, and what their grids run over."""

from __future__ import annotations

from tests.plan.cuda_gradients import module_of


def test_dq_has_a_kernel_of_its_own_unless_it_is_added_atomically() -> None:
    assert list(module_of().backward_kernels) == ["dq", "dkdv"]
    assert list(module_of("accumulate.dq = atomic").backward_kernels) == ["dkdv"]
    assert list(module_of(d=256).backward_kernels) == ["dq", "dkdv"]  # one kernel, however wide


def test_a_sequential_dq_has_one_block_for_each_head() -> None:
    kernels = module_of("accumulate.dq = sequential").backward_kernels
    assert [(name, planned.grid.over) for name, planned in kernels.items()] == [("dkdv", "head")]
