"""The CPU in place of a GPU: kernels run right, and what is undefined on a GPU is a fault."""

from __future__ import annotations

import struct
from functools import cache

import pytest
import torch

from attnc.plan import ir
from attnc.verify.runners import runner_of
from attnc.verify.simt import KeptCounter, SimtFault, available, launch, run_on_cpu
from attnc.verify.subject import Subject, subject_of
from tests.by_day import some_by_day
from tests.plans import SPECS, plans_of
from tests.verify.judging import examples, fuzz, right_by_day

pytestmark = pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")


@cache
def modules(name: str) -> tuple[ir.Module, ...]:
    planned = plans_of(name).modules
    return tuple(module for module in planned if runner_of(module.target).warps_matter)


def named(name: str) -> bool:
    return "for cuda.sm_80" in (SPECS / f"{name}.attn").read_text(encoding="utf-8")


NAMES = sorted(path.stem for path in SPECS.glob("*.attn") if named(path.stem))


def subject(name: str, number: int = 0) -> Subject:
    return subject_of(modules(name)[number])


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", some_by_day(NAMES, of=14))
def test_specs_are_right(name: str) -> None:
    right_by_day(subject(name), count=1)


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, 8, 2))
def test_the_four_orders_are_right(number: int) -> None:
    report = fuzz(subject("warp_split", number), examples=examples(4))
    assert report.ok, f"{report.failures[0].repro}\n{report.failures[0].verdict.message}"


@pytest.mark.slow
def test_drawn_cases_pass() -> None:
    report = fuzz(subject("prefix_document"), examples=examples(6))
    assert report.ok, f"{report.failures[0].repro}\n{report.failures[0].verdict.message}"


def kernel(body: str) -> str:
    """A kernel of the generated form that reads `in` and writes `out`."""
    return f"""
typedef unsigned int u32;
struct f16 {{ unsigned short bits; }};
typedef f16 element;
struct Args {{ const float* in; float* out; int n; }};
#include "simt.h"
extern "C" __global__ void __launch_bounds__(64) example(const __grid_constant__ Args args)
{{
    extern __shared__ __align__(128) element shared[];
    float* const tile = (float*)shared;
    const int i = threadIdx.x;
    {body}
}}
"""


def run(body: str, *, seed: int = 0, shared: int = 256) -> torch.Tensor:
    """What a block of 64 threads makes of 0, 1, 2, ..."""
    values, result = torch.arange(64.0), torch.full((64,), torch.nan)
    args = struct.pack("=2Qi4x", values.data_ptr(), result.data_ptr(), 64)
    launch(kernel(body), {}, args, blocks=1, threads=64, shared=shared, seed=seed)
    return result


REVERSED = "tile[i] = args.in[i]; {barrier} args.out[i] = tile[63 - i];"


def test_a_barrier_orders_warps() -> None:
    for seed in range(4):
        out = run(REVERSED.format(barrier="__syncthreads();"), seed=seed)
        assert torch.equal(out, torch.arange(64.0).flip(0))


def test_a_missing_barrier_shows() -> None:
    assert run(REVERSED.format(barrier="")).isnan().any()


def test_lanes_exchange_in_step() -> None:
    out = run("args.out[i] = shuffle_xor(args.in[i], 3);")
    assert torch.equal(out, torch.arange(64).bitwise_xor(torch.tensor(3)).float())


COPY = "copy_async(tile + 4 * i, args.in + 4 * i, i < 12); commit_copies(); {wait} __syncthreads(); "


OWN = "u32 x[4]; copy_async(tile + 4 * i, args.in, true); commit_copies();"


def test_a_copy_is_there_after_the_wait() -> None:
    body = COPY.format(wait="wait_copies<0>();") + "args.out[i] = tile[i];"
    out = run(body, shared=1024)
    assert torch.equal(out[:48], torch.arange(48.0))
    assert not out[48:].any()


def test_a_missing_wait_shows() -> None:
    assert any(
        run(COPY.format(wait="") + "args.out[i] = tile[i]; wait_copies<0>();", seed=s, shared=1024)
        .isnan()
        .any()
        for s in range(3)
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("if (i < 32) __syncthreads();", "a barrier that other warps never reach"),
        ("if (i % 2) __syncthreads();", "lanes of a warp are at different instructions"),
        ("if (i < 32)\n __syncthreads();\n else\n __syncthreads();", "warps wait at different barriers"),
        ("tile[i + 64] = 0.0f;", "a write past the end of shared memory"),
        ("copy_async(tile, args.in + 1, true);", "a copy that is not aligned"),
        ("copy_async(tile, args.in, true); wait_copies<0>();", "a copy is left without a wait"),
        ("u32 x[4]; ldmatrix_x4(x, 8u);", "not aligned"),
        (f"{OWN} __syncthreads(); ldmatrix_x4(x, 16 * i);", "before a wait for it"),
        (f"{OWN} wait_copies<0>(); ldmatrix_x4(x, 16 * i);", "another lane has copied, without a __syncwarp"),
        (f"{OWN} wait_copies<0>(); __syncwarp(); ldmatrix_x4(x, 16 * (i ^ 32));", "without a barrier since"),
        ("args.out[i] = i / (args.n - 64);", "a division by zero"),
    ],
)
def test_what_is_undefined_is_a_fault(body: str, said: str) -> None:
    with pytest.raises(SimtFault, match=said):
        run(body)


ALIGNED = """
    struct alignas(16) Four { float values[4]; };
    auto by_chunks = [&](const float* from) { return *(const Four*)from; };
    args.out[i] = by_chunks(args.in + %s).values[0];
"""


def test_several_numbers_are_accessed_at_multiples_of_their_bytes() -> None:
    """Of kernels that look at an address first: those of tensors may begin anywhere."""
    assert run(ALIGNED % "i / 4 * 4").isfinite().all()
    with pytest.raises(SimtFault, match="an access at an address that is not aligned"):
        run(ALIGNED % "i / 4 * 4 + 2")


def test_a_launch_leaves_the_counter_of_tiles_as_it_was() -> None:
    counter = KeptCounter(torch.zeros(4, dtype=torch.int32))
    with counter.launched():
        counter(-1)[0] += 3
        counter(-1)[0] -= 3
    with pytest.raises(SimtFault, match="leaves a counter"), counter.launched():
        counter(-1)[1] = 1
    with counter.launched():
        assert not counter(-1).any()


def test_numbers_are_rounded_to_nearest_even() -> None:
    out = run("args.out[i] = simt::widen(f16{(unsigned short)pack(1.0f + args.in[i] / 2048, 0.0f)});")
    assert torch.equal(out, (1 + torch.arange(64.0) / 2048).half().float())


def test_only_cuda_modules_run_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="torch is not a CUDA module that attnc generated"):
        run_on_cpu(torch)


def test_more_flags_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "args.out[i] = NUMBER;"
    for number in (3, 4):  # each is a library of its own
        monkeypatch.setenv("ATTNC_SIMT_FLAGS", f"-O0 '-DNUMBER={number} + 1'")
        assert run(f"{body}  // {number}").eq(number + 1).all()
    monkeypatch.setenv("ATTNC_SIMT_FLAGS", "-fno-such-flag")
    with pytest.raises(ValueError, match="no-such-flag"):
        run(f"{body}  // refused")
