"""Softpick: forward, splits of keys, lengths, packed rows, and gradients; against a formula in torch."""

from __future__ import annotations

import pytest
import torch

from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.subject import subject_of
from tests.by_day import some_by_day
from tests.targets import EACH, needs_gxx, skip_without_compiler, small_decode_tiles, small_tiles
from tests.verify.judging import assert_within_bound, modules_of, right_by_day, spec, subject_of_text

PLAIN = (
    "input q: bf16[B, M, Hkv * G, 16]",
    "input k, v: bf16[B, N, Hkv, 16]",
    "input table: f32[Hkv * G, 64]",
    "score = dot(q, k) / sqrt(D) + table[h, clamp(q_pos - kv_idx, 0, 63)]",
    "mask = causal",
    "normalize = softpick",
    "output o: bf16[B, M, Hkv * G, 16]",
    "output lse: f32[B, Hkv * G, M]",
    "grad q, k, v, table",
)
LENGTHS = (
    "input q: f16[B, M, H, 24]",
    "input k, v: f16[B, N, H, 24]",
    "input gate: f32[B, M, H]",
    "input lens: i32[B]",
    "length M = lens[b]",
    "length N = lens[b]",
    "score = 20 * dot(q, k)",
    "mask = window(5, 2)",
    "normalize = softpick",
    "output o: f16[B, M, H, 24] = attention * gate[b, q_idx, h]",
    "grad q, k, v, gate",
)
PACKED = (
    "input q: bf16[T, H, 16] via ragged(ends)",
    "input k, v: bf16[T, H, 16] via ragged(ends)",
    "input ends: i32[B + 1]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = softpick",
    "output o: bf16[T, H, 16]",
    "grad q, k, v",
)
TILES = "tile.q = 16, tile.kv = 16"
SMALL = {"cuda.sm_90a": "consumers = 2, tile.kv = 32, stages = 2"}


STORED = {"table": PLAIN, "lengths": LENGTHS}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("stored", "softmax"),
    some_by_day(
        STORED, ["online", "online(rescale = lazy(4))", "online(rescale = every_step)", "two_pass"], of=2
    ),
)
def test_softpick(stored: str, softmax: str) -> None:
    right_by_day(subject_of_text(spec(STORED[stored], f"{TILES}, softmax = {softmax}")), count=2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("lines", "target", "schedule"),
    [
        (PLAIN, "cuda.sm_80", small_tiles("cuda.sm_80")),
        pytest.param(PLAIN, "cuda.sm_90a", SMALL["cuda.sm_90a"], marks=pytest.mark.nightly),
        pytest.param(
            *(LENGTHS, "cuda.sm_80", f"{small_tiles('cuda.sm_80')}, softmax = two_pass"),
            marks=pytest.mark.nightly,
        ),
        (LENGTHS, "cuda.sm_90a", f"{SMALL['cuda.sm_90a']}, softmax = online(rescale = lazy(4))"),
    ],
    ids=["sm_80", "sm_90a", "sm_80 in two passes", "sm_90a lazily"],
)
def test_softpick_on_cuda(lines: tuple[str, ...], target: str, schedule: str) -> None:
    skip_without_compiler(target)
    right_by_day(subject_of_text(spec(lines, schedule, target=target)), count=1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("softmax", ["online", "online(rescale = every_step)", "online(rescale = lazy(4))"])
def test_softpick_of_warps_with_keys_of_their_own(softmax: str) -> None:
    skip_without_compiler("cuda.sm_80")
    schedule = f"tile.q = 32, tile.kv = 32, warps = 2, warp_split = kv, softmax = {softmax}"
    lines = [line for line in PLAIN if not line.startswith("grad")]
    made = subject_of_text(spec(lines, schedule, target="cuda.sm_80"))
    assert_within_bound(made, Case(dims={"B": 2, "M": 77, "N": 40, "Hkv": 1, "G": 2}))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", EACH)
def test_softpick_of_packed_rows(target: str) -> None:
    skip_without_compiler(target)
    made = subject_of_text(spec(PACKED, SMALL.get(target) or small_tiles(target), target=target))
    assert_within_bound(made, Case(dims={"B": 3, "M": 21, "N": 21, "H": 2}))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("split", ["1", "3", "fixed(32)"])
def test_splits_share_one_denominator(split: str, target: str) -> None:
    """The small number that joins it does so once."""
    skip_without_compiler(target)
    lines = [line for line in PLAIN if not line.startswith(("grad", "mask"))]
    schedule = f"{small_decode_tiles(target)}, split.kv = {split}"
    made = subject_of_text(spec(lines, schedule, target=target))
    assert_within_bound(made, Case(dims={"B": 2, "M": 1, "N": 77, "Hkv": 2, "G": 2}))


@pytest.mark.one_in(4)
@needs_gxx
@pytest.mark.parametrize("split", ["1", "3"])
@pytest.mark.parametrize("values", ["[B, N, 1, 128]", "[B, N, 1, 128] via prefix(k)"], ids=["one", "two"])
def test_splits_and_consumers_on_hopper_share_one_denominator(values: str, split: str) -> None:
    lines = (
        "input q: bf16[B, M, H, 192]",
        "input k: bf16[B, N, 1, 192]",
        f"input v: bf16{values}",
        "score = dot(q, k) / sqrt(D)",
        "normalize = softpick",
        "output o: bf16[B, M, H, 128]",
        "output lse: f32[B, H, M]",
    )
    schedule = f"loops = [kv], pack = gqa, split.kv = {split}"
    made = subject_of_text(spec(lines, schedule, target="cuda.sm_90a"))
    assert_within_bound(made, Case(dims={"B": 1, "M": 1, "N": 300, "H": 5}))


def test_formula() -> None:
    made = subject_of_text(spec([line for line in PLAIN if "grad" not in line], TILES))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 20, 2, 16, generator=generator).bfloat16()
    k, v = (torch.randn(1, 20, 1, 16, generator=generator).bfloat16() for _ in "kv")
    table = torch.zeros(2, 64)
    o, lse = made.function(q, k, v, table)
    scores = torch.einsum("bmhd,bnd->bhmn", q.double(), k[:, :, 0].double()) / 4
    terms = torch.expm1(scores).tril()
    denominator = terms.abs().sum(-1) + 1e-6
    expected = torch.einsum("bhmn,bnd->bmhd", terms.relu() / denominator[..., None], v[:, :, 0].double())
    torch.testing.assert_close(o.double(), expected, rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(lse.double(), denominator.log(), rtol=1e-5, atol=1e-5)


def test_a_row_without_keys_is_0() -> None:
    lines = ["mask = kv_idx < q_idx" if line.startswith("mask") else line for line in PACKED[3:]]
    text = ("input q: bf16[B, M, H, 16]", "input k, v: bf16[B, N, H, 16]", *lines)
    text = tuple(line.replace("[T, H, 16]", "[B, M, H, 16]") for line in text)
    made = subject_of_text(spec(text, TILES))
    x = torch.randn(1, 20, 1, 16).bfloat16()
    assert not made.function(x, x, x)[0, 0].any()


OF_ZEROS = (
    "input q: bf16[B, M, H, 16]",
    "input k, v: bf16[B, N, H, 16]",
    "input bias: f32[N]",
    "score = where(kv_idx % 2 == 0, bias[kv_idx], dot(q, k))",
    "normalize = softpick",
    "output o: bf16[B, M, H, 16]",
    "grad q, k, v, bias",
)
ZEROS = Case(dims={"B": 1, "M": 20, "N": 20, "H": 1}, extras="zero")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", [*EACH, pytest.param("cuda.sm_90a", marks=pytest.mark.slow)])
def test_at_a_score_of_exactly_0_the_derivative_is_0(target: str) -> None:
    skip_without_compiler(target)
    assert_within_bound(
        subject_of_text(spec(OF_ZEROS, SMALL.get(target) or small_tiles(target), target=target)), ZEROS
    )


def test_a_derivative_at_a_score_of_exactly_0_is_seen() -> None:
    (module,) = modules_of(spec(OF_ZEROS, TILES))
    (text,) = render_files(module, path="a.attn", sha256="0" * 64).values()
    assert "s > 0.0" in text
    assert not check(subject_of(module, text.replace("s > 0.0", "s >= 0.0")), ZEROS).ok
