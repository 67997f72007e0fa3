"""What the CUDA targets decide: what fits, and what is refused."""

from __future__ import annotations

import pytest

from attnc.plan.sm80 import layout_of
from attnc.plan.sm80.forward import cuda_estimate
from tests.plan.cuda import planned
from tests.refusals import refusal, refused


def test_shared_memory_is_counted_by_buffer() -> None:
    module = planned("tile.q = 64, tile.kv = 128, warps = 4, stages = 2")
    estimate = cuda_estimate(layout_of(module.kernel), module.kernel.configs[0])
    assert {buffer.name: buffer.bytes for buffer in estimate.buffers} == {
        "q": 64 * 64 * 2,
        "k": 2 * 128 * 64 * 2,
        "v": 2 * 128 * 64 * 2,
    }
    assert module.kernel.shared == (estimate.shared,)


def test_head_dimensions_are_padded_to_the_depth_of_an_mma() -> None:
    layout = layout_of(planned("tile.q = 64", d=72).kernel)
    assert (layout.d, layout.qk.width) == (72, 80)


def test_where_no_config_fits_one_that_does_is_named() -> None:
    def hints(knobs: str) -> tuple[str, ...]:
        return refused(planned, knobs).hints

    assert hints("tile.q = 16, tile.kv = 64") == ("'warp_split = kv' fits",)
    assert hints("tile.q = 16, tile.kv = 64, warp_split = q") == ("'warps = 1' fits",)
    assert hints("tile.q = 64, tile.kv = 256, stages = 8") == ("'stages = 1' fits",)


def test_configs_that_cannot_run_are_dropped() -> None:
    module = planned("tile.q in {32, 64}, warps in {4, 2}, tile.kv in {64, 1024}")
    tiles = [(c.tile_q, c.warps, c.tile_kv) for c in module.kernel.configs]
    assert tiles == [(32, 2, 64), (64, 4, 64), (64, 2, 64)]


@pytest.mark.parametrize(
    ("knobs", "options", "said"),
    [
        (
            "tile.q = 32, warps = 4",
            {},
            "tile.q = 32 is not a multiple of 64, 16 query rows for each of 4 warps",
        ),
        ("tile.kv = 32, warp_split = kv", {}, "tile.kv = 32 is not a multiple of 64, 16 keys for each of 4"),
        ("tile.q = 64, tile.kv = 256, stages = 8", {}, "B of shared memory (q 8192 + k 262144 + v 262144)"),
        ("tile.q = 256, warps = 4", {"d": 256}, "registers a thread; the limit is 255"),
        ("tile.q = 64", {"d": 20}, "the head dimension 20 is not a multiple of 8"),
        ("tile.q = 64", {"target": "cuda.sm_100a"}, "'cuda.sm_100a' has no kernels yet"),
        ("warp_split in {q, kv}", {}, "'warp_split' shapes the text of a CUDA kernel"),
        (
            "loops = [kv], warp_split = kv, softmax = unified_max(phi = 0, bounds = [-60, 60])",
            {"d": 512},
            "a unified maximum needs a head dimension of at most 256",
        ),
        ("tile.d = 32", {}, "the head dimension stays whole"),
        ("softmax = two_pass, warp_split = kv", {}, "two passes are not lowered to CUDA where warps share"),
        ("loops = [kv, q], softmax = online", {}, "needs softmax = online(rescale = every_step)"),
    ],
)
def test_what_cannot_be_lowered_is_refused_with_the_reason(
    knobs: str, options: dict[str, object], said: str
) -> None:
    assert said in refusal(planned, knobs, **options)


def test_warps_share_keys_where_rows_are_wide_and_a_schedule_says_nothing() -> None:
    assert [layout_of(planned("", d=d).kernel).warp_split for d in (256, 512)] == ["q", "kv"]
    decoding = planned("loops = [kv], pack = gqa, split.kv = auto", d=512).kernel
    assert layout_of(decoding).warp_split == "kv"
    assert decoding.configs[0].tile_q == 16
