"""What the CUDA targets decide: layouts, what fits, what is refused, how much is moved."""

from __future__ import annotations

import pytest

from attnc.build import front, plan_program
from attnc.model.resolve import resolve
from attnc.model.variants import variants
from attnc.plan import ir
from attnc.plan.layout import Traffic
from attnc.plan.lower import plan
from attnc.plan.picture import picture
from attnc.plan.sm80 import layout_of
from attnc.plan.sm80.forward import cuda_estimate
from attnc.plan.sm80.layout import Swizzle, traffic
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from tests.plans import SPECS
from tests.refusals import refusal, refused
from tests.targets import TARGETS

SPEC = """
attention plain {{
  param D in {{{d}}}
  input q: {dtype}[B, M, H, D]
  input k, v: {dtype}[B, N, H, D]
  score = dot(q, k) / sqrt(D)
  normalize = softmax
  output o: {dtype}[B, M, H, D]
}}
schedule plain for {target} {{
  {knobs}
}}
"""


def planned(knobs: str, *, d: int = 64, dtype: str = "bf16", target: str = "cuda.sm_80") -> ir.Module:
    source = Source("plain.attn", SPEC.format(knobs=knobs, d=d, dtype=dtype, target=target))
    program = resolve(parse(source), prelude())
    (variant,) = variants(program, program.attentions[0])
    return plan(variant, program.schedules[0])


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "cuda.sm_90a"])
def test_flash_attention_1_renormalises_in_every_step(target: str) -> None:
    knobs = "loops = [kv, q], tile.q = 64, tile.kv = 64, warps = 4"
    implied = planned(knobs, target=target).kernel
    said = planned(f"{knobs}, softmax = online(rescale = every_step)", target=target).kernel
    assert implied.softmax == said.softmax
    assert implied.bound == said.bound
    assert implied.bound.renormalised


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
