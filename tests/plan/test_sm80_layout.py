"""Layouts of CUDA kernels: banks of shared memory, and how many bytes are moved."""

from __future__ import annotations

import pytest

from attnc.build import front, plan_program
from attnc.plan.layout import KernelName, Traffic
from attnc.plan.picture import picture
from attnc.plan.sm80 import backward_layout_of, layout_of
from attnc.plan.sm80.layout import Swizzle, traffic
from tests.plans import SPECS


@pytest.mark.parametrize("chunk", [8, 4])
@pytest.mark.parametrize("width", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 576])
def test_eight_rows_of_a_column_of_chunks_lie_in_different_banks(width: int, chunk: int) -> None:
    swizzle = Swizzle(width=width, chunk=chunk)

    def place(row: int, chunk: int) -> int:
        permuted = chunk ^ (row // swizzle.span % swizzle.period)
        assert 0 <= permuted < swizzle.chunks
        return row * swizzle.chunks + permuted

    for column in range(swizzle.chunks):
        for first in range(0, 32, 8):
            assert len({place(first + row, column) % 8 for row in range(8)}) == 8
    assert len({place(row, c) for row in range(32) for c in range(swizzle.chunks)}) == 32 * swizzle.chunks


def four_orders(length: int) -> dict[str, Traffic]:
    """By attention of specs/warp_split.attn at D = 64: 64 x 64 tiles, 4 warps."""
    found = {}
    for module in plan_program(front(SPECS / "warp_split.attn")).modules:
        kernel = module.kernel
        if layout_of(module.kernel).d == 64:
            tiles = picture(kernel, length, length, 64, 64)
            name = module.variant.attention.name
            found[name] = traffic(kernel, layout_of(module.kernel), kernel.configs[0], tiles)
    return found


def test_split_k_and_the_outer_kv_loop_cost_what_the_papers_say() -> None:
    moved = four_orders(4096)
    tiles = 4096 // 64
    # FlashAttention-1 moves o, l and m at every step, FlashAttention-2 writes o once.
    state = tiles * 4096 * (64 + 2) * 4
    assert moved["fa2_split_q"].global_written == 4096 * (64 * 2 + 4)
    assert moved["fa1_split_q"].global_written - moved["fa2_split_q"].global_written == state + 4096 * 66 * 4
    assert moved["fa1_split_q"].moved > 2.5 * moved["fa2_split_q"].moved
    # The split does not change what goes to global memory, and split-K multiplies what is shared.
    for order in ("fa1", "fa2"):
        assert moved[f"{order}_split_k"].moved < 1.05 * moved[f"{order}_split_q"].moved
        assert moved[f"{order}_split_k"].shared_written > 3 * moved[f"{order}_split_q"].shared_written


def test_predicted_bytes_are_those_that_a_gpu_counted() -> None:
    """smsp__sass_data_bytes_mem_* of Nsight Compute on an NVIDIA H200, 128 heads of 1024 queries and keys:
    all global, shared op_ld + op_ldsm, shared op_st, which leaves out what cp.async writes.
    """
    counted = {
        "fa2_split_q": (570_949_632, 2_432_696_320, 16_777_216),
        "fa2_split_k": (570_949_632, 3_930_062_848, 2_208_825_344),
        "fa1_split_q": (1_495_793_664, 2_415_919_104, 0),
        "fa1_split_k": (1_546_125_312, 4_043_309_056, 2_222_981_120),
    }
    for name, moved in four_orders(1024).items():
        total = moved.times(128)
        copied = 1024 * 64 * 2 * (33 if name.startswith("fa2") else 18) * 128
        found = (total.moved, total.shared_read, total.shared_written - copied)
        assert found == pytest.approx(counted[name], rel=2e-3)


@pytest.mark.parametrize(
    ("kernel", "rows", "columns", "kept"),
    [("dq", 16, 144, {"q", "do", "k", "ds"}), ("dk", 32, 144, {"q", "do", "k", "ds", "p", "rows"})],
)
def test_warps_sum_columns_of_latents_once(
    kernel: KernelName, rows: int, columns: int, kept: set[str]
) -> None:
    """Of a tile of 576 columns, eight warps have each element of the gradient once, in their registers."""
    (module,) = (
        module
        for module in plan_program(front(SPECS / "mla_training.attn")).modules
        if module.variant.attention.name == "mla_training" and module.target == "cuda.sm_80"
    )
    assert module.backward is not None
    plan = backward_layout_of(module.backward)
    for config in (planned.configs[0] for planned in module.backward.kernels if planned.kind == kernel):
        assert (plan.rows_of_latents(config, kernel), plan.columns_of_latents(config, kernel)) == (
            rows,
            columns,
        )
        tile = config.tile_q if kernel == "dq" else config.tile_kv
        assert config.warps * rows * columns == tile * 576
        assert set(plan.shared_memory(config, kernel)) == kept
        assert plan.registers(config, kernel)["acc"] == rows * columns // 32
        assert plan.shared_memory(config, kernel)["k"] % (config.tile_kv * 576 * 2) == 0
