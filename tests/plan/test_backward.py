"""Which kernels a backward has, and what their grids run over."""

from __future__ import annotations

import pytest

from tests.plan.cuda_gradients import module_of
from tests.plan.planning import planned


def test_dq_has_a_kernel_of_its_own_unless_it_is_added_atomically() -> None:
    assert list(module_of().backward_kernels) == ["dq", "dkdv"]
    assert list(module_of("accumulate.dq = atomic").backward_kernels) == ["dkdv"]
    assert list(module_of(d=256).backward_kernels) == ["dq", "dkdv"]  # one kernel, however wide


def test_a_sequential_dq_has_one_block_for_each_head() -> None:
    kernels = module_of("accumulate.dq = sequential").backward_kernels
    assert [(name, kernel.grid.over) for name, kernel in kernels.items()] == [("dkdv", "head")]


@pytest.mark.parametrize(
    ("shape", "index", "along"),
    [
        ("[H, 4]", "[h, 3]", ("h", 3)),
        ("[4]", "[0]", (0,)),
        ("[H, N]", "[h, 0]", None),
        ("[H, N]", "[h, kv_idx]", ("h", "kv_idx")),
        ("[B, H]", "[b, h]", ("b", "h")),
        ("[N, N]", "[kv_idx, kv_idx]", None),
    ],
)
def test_a_gradient_has_places_of_its_own_where_indices_are_those_of_its_axes(
    shape: str, index: str, along: tuple[object, ...] | None
) -> None:
    """A constant as well, if it is known to lie inside."""
    backward = planned(score=f"dot(q, k) + bias{index}", inputs=(f"bias: f32{shape}",), grads="bias").backward
    assert backward is not None
    (found,) = (gradient for gradient in backward.gradients if gradient.tensor.name == "bias")
    assert [part.places for part in found.parts] == [along or ()]
    assert [part.accumulate for part in found.parts] == ["atomic" if along is None else "two_pass"]
