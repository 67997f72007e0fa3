"""What the backward kernels of the CUDA targets decide: layouts, what fits, what is refused."""

from __future__ import annotations

import pytest

from attnc.plan.ir import Module
from attnc.plan.sm80 import backward_layout_of
from attnc.plan.sm80.backward import cuda_backward_estimate
from attnc.plan.sm80.layout import CudaBackwardLayout
from tests.plan.cuda_gradients import module_of
from tests.plan.planning import planned
from tests.refusals import refusal


def layout_of(module: Module) -> CudaBackwardLayout:
    assert module.backward is not None
    return backward_layout_of(module.backward)


@pytest.mark.parametrize(("d", "exchange"), [(64, False), (72, True), (128, True), (256, True)])
def test_warps_share_keys_where_accumulators_are_wide(d: int, exchange: bool) -> None:
    module = module_of(d=d)
    layout = layout_of(module)
    assert layout.exchange is exchange
    config = module.backward_kernels["dkdv"].configs[0]
    assert layout.registers(config, "dkdv")["acc"] <= 128
    assert layout.parts(config) > 1 or not exchange


def test_the_schedule_may_say_how_warps_share() -> None:
    tiles = "dkdv {\n tile.q = 64, tile.kv = 128, warps = 8\n }"
    assert not layout_of(module_of(f"warp_split = kv\n{tiles}", d=128)).exchange
    assert layout_of(module_of(f"warp_split = q\n{tiles}", d=64)).exchange


def test_shared_memory_is_counted_by_buffer() -> None:
    tiles = "dkdv {\n tile.q = 64, tile.kv = 128, warps = 8, stages = 2\n }"
    module = module_of(f"accumulate.dq = atomic, warp_split = q\n{tiles}", d=128)
    kernel = module.backward_kernels["dkdv"]
    estimate = cuda_backward_estimate(layout_of(module), kernel.configs[0], "dkdv")
    assert {buffer.name: buffer.bytes for buffer in estimate.buffers} == {
        "k": 128 * 128 * 2,
        "v": 128 * 128 * 2,
        "q": 2 * 64 * 128 * 2,
        "do": 2 * 64 * 128 * 2,
        "ds": 128 * 64 * 2,
        "p": 128 * 64 * 2,
        "rows": 2 * 2 * 64 * 4,
    }
    assert kernel.shared == (estimate.shared,)


@pytest.mark.parametrize("apart", [True, False])
def test_blocks_share_wide_gradients_beside_those_of_a_sink(apart: bool) -> None:
    """A kernel of rows makes these; sums of what the score reads want the scores of all blocks."""
    reads = {"softmax": "softmax(sink = x[h])"} if apart else {"score": "dot(q, k) * x[h]"}

    def make() -> Module:
        grads, inputs = "q, k, v, x", ("x: f32[H]",)
        return planned(schedule="", target="cuda.sm_80", d=512, grads=grads, inputs=inputs, **reads)

    if not apart:
        assert refusal(make).startswith("E0601 no config of schedule 'under_test' for dq fits")
        return
    layout = layout_of(make())
    assert (layout.sliced, layout.sums) == (True, False)


def test_configs_that_cannot_run_are_dropped() -> None:
    module = module_of(
        "warp_split = kv\n"
        "dkdv {\n tile.q in {32, 48, 64}, tile.kv in {32, 128}, warps = 4, stages in {1, 8}\n }"
    )
    tiles = [(c.tile_q, c.tile_kv, c.stages) for c in module.backward_kernels["dkdv"].configs]
    assert tiles == [(32, 128, 1), (32, 128, 8)]


@pytest.mark.parametrize(
    ("backward", "said"),
    [
        ("warp_split in {q, kv}", "'warp_split' shapes the text of a CUDA kernel"),
        ("dkdv {\n dp = late\n }", "dP comes before P is needed in a CUDA kernel"),
        ("dkdv {\n dp in {early, late}\n }", "dP comes before P is needed in a CUDA kernel"),
        ("dkdv {\n tile.kv = 16, warps = 4\n }", "is not a multiple of 64, 16 keys for each of 4 warps"),
        ("dkdv {\n tile.q = 48\n }", "tile.q = 48 is not a power of two"),
        ("dq {\n tile.q = 32\n }", "tile.q = 32 is not a multiple of 64, 16 rows for each of 4 warps"),
        ("dkdv {\n tile.kv = 256\n }", "registers a thread; the limit is 255"),
        ("dkdv {\n stages = 8, tile.q = 128, warps = 8, tile.kv = 128\n }", "B of shared memory (k 16384"),
    ],
)
def test_what_cannot_be_lowered_is_refused_with_the_reason(backward: str, said: str) -> None:
    assert said in refusal(module_of, backward)


@pytest.mark.parametrize("d", [448, 512])
def test_blocks_share_columns_that_one_cannot_hold(d: int) -> None:
    module = planned(d=d, grads="q, k, v", target="cuda.sm_80")
    layout = layout_of(module)
    assert layout.sliced
    for name, kernel in module.backward_kernels.items():
        width = layout.slice_of(layout.layout.qk.width, kernel.kind)
        assert width * layout.slices(kernel.kind) >= layout.layout.qk.width
        assert all(layout.registers(config, kernel.kind)["acc"] <= 128 for config in kernel.configs), name


def test_blocks_share_no_columns_where_one_holds_them() -> None:
    assert not layout_of(module_of(d=256)).sliced
