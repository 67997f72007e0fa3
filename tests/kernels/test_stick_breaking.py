"""Stick-breaking: forward, gradients, splits of keys, lengths, packed rows, pages; formulas in torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.stick_errors import SOFTPLUS_ERROR
from tests.by_day import each_by_day, some_by_day
from tests.plans import module_of
from tests.targets import EACH, skip_without_compiler, small_tiles
from tests.verify.judging import assert_within_bound, modules_of, right_by_day, spec, subject_of_text

PLAIN = (
    "input q: bf16[B, M, Hkv * G, 16]",
    "input k, v: bf16[B, N, Hkv, 16]",
    "input table: f32[Hkv * G, 64]",
    "score = dot(q, k) / sqrt(D) + table[h, clamp(q_pos - kv_idx, 0, 63)]",
    "mask = kv_idx < q_pos",
    "normalize = stick_breaking",
    "output o: bf16[B, M, Hkv * G, 16]",
    "output lse: f32[B, Hkv * G, M]",
)
LENGTHS = (
    "input q: f16[B, M, H, 24]",
    "input k, v: f16[B, N, H, 24]",
    "input gate: f32[B, M, H]",
    "input lens: i32[B]",
    "length M = lens[b]",
    "length N = lens[b]",
    "score = where(kv_idx == 3, -inf, 20 * dot(q, k))",
    "mask = window(5, 2)",
    "normalize = stick_breaking",
    "output o: f16[B, M, H, 24] = attention * gate[b, q_idx, h]",
    "output lse: f32[B, H, M]",
)
PACKED = (
    "input q: bf16[T, H, 16] via ragged(ends)",
    "input k, v: bf16[T, H, 16] via ragged(ends)",
    "input ends: i32[B + 1]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = stick_breaking",
    "output o: bf16[T, H, 16]",
)
PAGED = (
    "input q: bf16[B, M, H, 16]",
    "input k, v: bf16[B, N, H, 16] via paged(pages, page = 16)",
    "input pages: i32[B, P]",
    "input lens: i32[B]",
    "length N = lens[b]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = stick_breaking",
    "output o: bf16[B, M, H, 16]",
)
TILES = "tile.q = 16, tile.kv = 16"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("lines", [PLAIN, LENGTHS, PAGED], ids=["table", "lengths", "pages"])
def test_stick_breaking(lines: tuple[str, ...]) -> None:
    right_by_day(subject_of_text(spec(lines, TILES)), count=2)


ON_CUDA = {"cuda.sm_80": small_tiles("cuda.sm_80"), "cuda.sm_90a": "consumers = 2, tile.kv = 32, stages = 2"}


@pytest.mark.one_in(8)
@pytest.mark.slow
@pytest.mark.parametrize("target", ON_CUDA)
@pytest.mark.parametrize("lines", [PLAIN, LENGTHS, PAGED], ids=["table", "lengths", "pages"])
def test_stick_breaking_on_cuda(lines: tuple[str, ...], target: str) -> None:
    skip_without_compiler(target)
    right_by_day(subject_of_text(spec(lines, ON_CUDA[target], target=target)), count=1)


@pytest.mark.parametrize("target", EACH)
def test_stick_breaking_of_packed_rows(target: str) -> None:
    skip_without_compiler(target)
    made = subject_of_text(spec(PACKED, ON_CUDA.get(target, TILES), target=target))
    assert_within_bound(made, Case(dims={"B": 3, "M": 21, "N": 21, "H": 2}))


def test_stick_breaking_of_f32_on_cuda() -> None:
    skip_without_compiler("cuda.sm_80")
    lines = [line.replace("bf16", "f32") for line in PLAIN]
    made = subject_of_text(spec(lines, small_tiles("cuda.sm_80"), target="cuda.sm_80"))
    assert_within_bound(made, Case(dims={"B": 1, "M": 70, "N": 77, "Hkv": 1, "G": 2}))
    (at_lanes,), (in_parts,) = (
        modules_of(spec(lines, small_tiles("cuda.sm_80"), target="cuda.sm_80")),
        modules_of(spec(lines, TILES)),
    )
    assert at_lanes.kernel.bound.summand_error == 0 < in_parts.kernel.bound.summand_error


DECODING = {
    "triton": "tile.kv = 16",
    "cuda.sm_80": "tile.q = 16, tile.kv = 16, warps = 1, stages = 2",
    "cuda.sm_90a": "tile.kv = 16, stages = 2",
}
#: Of queries past the end nothing is left: no split has them.
SHORTENED = tuple(
    line.replace(" = attention * gate[b, q_idx, h]", "") for line in LENGTHS if "input gate" not in line
)


STORED = {"table": PLAIN, "pages": PAGED, "lengths": SHORTENED}


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("split", "stored", "target"), some_by_day(["1", "20", "fixed(32)"], STORED, EACH, of=2)
)
def test_splits_leave_each_other_the_rest(split: str, stored: str, target: str) -> None:
    skip_without_compiler(target)
    schedule = f"loops = [kv], pack = gqa, {DECODING[target]}, split.kv = {split}"
    made = subject_of_text(spec(STORED[stored], schedule, target=target))
    dims = {"B": 3, "M": 3, "N": 77, "Hkv": 2, "G": 2, "H": 2}
    for lengths in ("drawn", "one"):  # rows past a length, in sequences that have keys
        assert_within_bound(made, Case(dims=dims, lengths=lengths))


def test_formula() -> None:
    made = subject_of_text(spec(PLAIN, TILES))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 20, 2, 16, generator=generator).bfloat16()
    k, v = (torch.randn(1, 20, 1, 16, generator=generator).bfloat16() for _ in "kv")
    o, lse = made.function(q, k, v, torch.zeros(2, 64))
    share = torch.sigmoid(torch.einsum("bmhd,bnd->bhmn", q.double(), k[:, :, 0].double()) / 4).tril(-1)
    stick, weights = torch.ones(1, 2, 20, dtype=torch.float64), torch.zeros_like(share)
    for key in reversed(range(20)):
        weights[..., key] = share[..., key] * stick
        stick = stick * (1 - share[..., key])
    expected = torch.einsum("bhmn,bnd->bmhd", weights, v[:, :, 0].double())
    torch.testing.assert_close(o.double(), expected, rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(lse.double(), stick.log(), rtol=1e-5, atol=1e-5)
    assert not o[:, 0].any()
    assert not lse[:, :, 0].any()  # without a key all of the stick is left


BACKWARD = f"{TILES}, backward {{ {TILES} }}".replace(", backward", "\n  backward").replace(" }", "\n  }")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("lines", "grads"),
    [(PLAIN, "q, k, v, table"), (LENGTHS, "q, k, v, gate")],
    ids=["table", "lengths"],
)
def test_gradients(lines: tuple[str, ...], grads: str) -> None:
    right_by_day(subject_of_text(spec((*lines, f"grad {grads}"), BACKWARD)), count=2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "lines", [PACKED, (*PACKED[:-1], "output o: bf16[T, H, 16]", "output lse: f32[H, T]")]
)
def test_gradients_of_packed_rows(lines: tuple[str, ...]) -> None:
    made = subject_of_text(spec((*lines, "grad q, k, v"), BACKWARD))
    assert_within_bound(made, Case(dims={"B": 3, "M": 21, "N": 21, "H": 2}))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("wanted", ["q", "k", "v", "table", "v, table", "q, v"])
def test_gradients_one_by_one(wanted: str) -> None:
    made = subject_of_text(spec((*PLAIN, f"grad {wanted}"), BACKWARD))
    assert_within_bound(made, Case(dims={"B": 1, "M": 33, "N": 40, "Hkv": 1, "G": 2}))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("reads_lse", [True, False])
def test_gradients_by_autograd(*, reads_lse: bool) -> None:
    made = subject_of_text(spec((*PLAIN, "grad q, k, v"), BACKWARD))
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 70, 2, 16, generator=generator).bfloat16().requires_grad_()
    k, v = (torch.randn(1, 70, 1, 16, generator=generator).bfloat16().requires_grad_() for _ in "kv")
    o, lse = made.function(q, k, v, torch.zeros(2, 64))
    d_o, d_lse = (torch.randn(x.shape, generator=generator).to(x.dtype) for x in (o, lse))
    d_lse = d_lse if reads_lse else torch.zeros_like(lse)
    results = ((o, lse), (d_o, d_lse)) if reads_lse else ((o,), (d_o,))
    found = torch.autograd.grad(results[0], (q, k, v), results[1])
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    score = torch.einsum("bmhd,bnd->bhmn", exact[0], exact[1][:, :, 0]) / 4
    seen = torch.ones(70, 70, dtype=torch.bool).tril(-1)
    kept = torch.nn.functional.logsigmoid(-score).masked_fill(~seen, 0)
    behind = kept.flip(-1).cumsum(-1).flip(-1)
    weights = (score + behind).exp().masked_fill(~seen, 0)
    outputs = (torch.einsum("bhmn,bnd->bmhd", weights, exact[2][:, :, 0]), kept.sum(-1))
    expected = torch.autograd.grad(outputs, exact, (d_o.double(), d_lse.double()))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2**-5, atol=2**-5)


#: Two warps have the keys of a tile of 32.
BACKWARD_ON_CUDA = """
  backward {
    tile.kv = 32
    dq {
      tile.q = 32, warps = 2
    }
    dkdv {
      tile.q = 16, warps = 2
    }
  }"""
CAPPED = tuple(line.replace("dot(q, k) / sqrt(D)", "softcap(dot(q, k), 2)") for line in PLAIN)
#: Between the first keys and the last ones lie tiles that no query sees.
GAPS = tuple(
    line.replace("kv_idx < q_pos", "kv_idx < q_pos and (kv_idx < 8 or q_pos - kv_idx < 20)") for line in PLAIN
)
F32 = tuple(line.replace("bf16", "f32") for line in PLAIN)
SHAPES = {"B": 2, "M": 40, "N": 45, "H": 2, "Hkv": 1, "G": 2}


#: On Hopper the same kernels make them, beside another forward.
ON_BOTH = (
    ("table", PLAIN, "q, k, v, table"),
    ("lengths", LENGTHS, "q, k, v, gate"),
    ("packed", PACKED, "q, k, v"),
)
ON_ONE = (
    ("softcap", CAPPED, "q, k"),
    ("gaps", GAPS, "q, k, v"),
    ("dq", PLAIN, "q"),
    ("dv", PLAIN, "v"),
    ("dtable", PLAIN, "table"),
)


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "grads", "target"),
    each_by_day(
        [
            pytest.param(lines, grads, target, id=f"{name}-{target}")
            for target, made in (("cuda.sm_80", (*ON_BOTH, *ON_ONE)), ("cuda.sm_90a", ON_BOTH))
            for name, lines, grads in made
        ],
        of=2,
    ),
)
def test_gradients_on_cuda(lines: tuple[str, ...], grads: str, target: str) -> None:
    skip_without_compiler(target)
    made = subject_of_text(spec((*lines, f"grad {grads}"), ON_CUDA[target] + BACKWARD_ON_CUDA, target=target))
    dims = (
        {**SHAPES, "N": 40} if lines is PACKED else {**SHAPES, "B": 1, "N": 130} if lines is GAPS else SHAPES
    )
    assert_within_bound(made, Case(dims=dims))


def test_gradients_of_f32_on_cuda() -> None:
    skip_without_compiler("cuda.sm_80")
    schedule = small_tiles("cuda.sm_80") + BACKWARD_ON_CUDA
    made = subject_of_text(spec((*F32, "grad q, k, v, table"), schedule, target="cuda.sm_80"))
    assert_within_bound(made, Case(dims=SHAPES))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("width", "target"),
    [*itertools.product([16, 64, 128, 200, 256], ON_CUDA), (320, "cuda.sm_80")],
)
def test_schedules_without_tiles_have_gradients(width: int, target: str) -> None:
    grads = "q, k, v, table" if width <= 128 else "q, k, v"  # blocks share wider rows, and none has all of ds
    lines = [line.replace(", 16]", f", {width}]") for line in (*PLAIN, f"grad {grads}")]
    (module,) = modules_of(spec(lines, "", target=target))
    kernels = module.backward_kernels.values()
    assert {config.tile_kv for kernel in kernels for config in kernel.configs} in ({64}, {32}, {16})


def test_tiles_of_keys_are_those_of_all_kernels() -> None:
    dq, dkdv = ("tile.kv in {64, 32}", "tile.kv in {16, 32}")
    schedule = f"backward {{\n    dq {{\n {dq}\n }}\n    dkdv {{\n {dkdv}\n }}\n }}"
    (module,) = modules_of(spec((*PLAIN, "grad q, k"), schedule))
    sizes = {config.tile_kv for kernel in module.backward_kernels.values() for config in kernel.configs}
    assert sizes == {32}


@pytest.mark.parametrize(
    ("tiles", "kept"),
    [
        ("tile.q in {32, 64}, warps = 8", [64]),  # 16 queries to each four warps read beyond shared memory
        ("tile.q in {32, 64}, warps = 4", [32, 64]),
    ],
)
def test_few_queries_are_not_shared_among_warps(tiles: str, kept: list[int]) -> None:
    schedule = f"backward {{\n    tile.kv = 64\n    dkdv {{\n {tiles}\n }}\n }}"
    (module,) = modules_of(spec((*PLAIN, "grad q, k"), schedule))
    assert [config.tile_q for config in module.backward_kernels["dkdv"].configs] == kept


def softplus() -> Callable[[Any], Any]:
    """The device function of a generated module, over arrays."""
    (text,) = render_files(
        module_of("stick_breaking", "triton", "d64"), path="a.attn", sha256="0" * 64
    ).values()
    found = re.search(r"def _softplus\(z\):.*?\n    return [^\n]*", text, re.S)
    assert found is not None
    scope: dict[str, Any] = {"tl": SimpleNamespace(exp2=np.exp2, abs=np.abs, maximum=np.maximum)}
    exec(found[0], scope)
    function: Callable[[Any], Any] = scope["_softplus"]
    return function


def test_what_a_key_leaves_is_right_however_little_it_is() -> None:
    small = np.linspace(-100, 0, 1_000_001, dtype=np.float32)
    z = np.concatenate([small, np.linspace(0, 100, 100_001, dtype=np.float32)])
    exact = np.logaddexp2(0.0, z.astype(np.float64))
    found = softplus()(z)
    assert found.dtype == np.float32
    of_exp2, of_sum = 2.0**-23, 2.0**-24
    assert np.abs(found / exact - 1).max() < SOFTPLUS_ERROR + of_exp2 + of_sum
    assert softplus()(np.array([-np.inf, np.inf], np.float32)).tolist() == [0.0, np.inf]
