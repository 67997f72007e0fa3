"""Weights without a softmax: of the score, of loaded values, under masks, lengths and in packed sequences."""

from __future__ import annotations

import pytest

from attnc.verify.case import Case
from tests.by_day import some_by_day
from tests.targets import EACH, needs_gxx, skip_without_compiler, small_tiles
from tests.verify.judging import assert_within_bound, right_by_day, spec, subject_of_text

#: A relative bias, lengths, target groups; a division once for each row, or, of f16, for each weight.
HSTU = (
    "input q: {}[B, M, Hkv * G, 16]",
    "input k, v: {}[B, N, Hkv, 16]",
    "input table: f32[Hkv * G, 64]",
    "input lens: i32[B]",
    "input targets: i32[B]",
    "length M = lens[b]",
    "length N = lens[b]",
    "score = dot(q, k) / sqrt(D) + table[h, clamp(q_pos - kv_idx, 0, 63)]",
    "weight = score * sigmoid(score) / N",
    "mask = causal and (kv_idx < N - targets[b] or kv_idx == q_pos)",
    "normalize = none",
    "output o: {}[B, M, Hkv * G, 16]",
    "grad q, k, v{}",
)
#: Squared ReLU, whose slope is 0 where the weight is; an epilogue; 24 columns.
RELU = (
    "input q: f16[B, M, H, 24]",
    "input k, v: f16[B, N, H, 24]",
    "input bias: f32[B, N]",
    "input gate: f32[B, M, H]",
    "score = dot(q, k) / sqrt(D) + bias[b, kv_idx]",
    "weight = max(score, 0) * max(score, 0) / 16",
    "normalize = none",
    "output o: f16[B, M, H, 24] = attention * gate[b, q_idx, h] / (1 + abs(attention))",
    "grad q, k, v, bias, gate",
)
#: A weight of 0 whose derivative is not: masked keys have to be told from it.
LINEAR = (
    "input q: bf16[B, M, H, 16]",
    "input k, v: bf16[B, N, H, 16]",
    "score = dot(q, k) / sqrt(D)",
    "mask = (q_pos - kv_idx) % 3 == 0",
    "normalize = none",
    "output o: bf16[B, M, H, 16]",
    "grad q, k, v",
)
#: A weight that is infinite over infinite beyond the end of a row.
PACKED = (
    "input q: bf16[T, H, 16] via ragged(ends)",
    "input k, v: bf16[T, H, 16] via ragged(ends)",
    "input ends: i32[B + 1]",
    "score = dot(q, k) / sqrt(D)",
    "weight = exp(score) / (1 + exp(2 * score))",
    "mask = window(7, 2)",
    "normalize = none",
    "output o: bf16[T, H, 16]",
    "grad q, k, v",
)


def hstu(element: str, wanted: str = "") -> tuple[str, ...]:
    return tuple(line.format(wanted if "grad" in line else element) for line in HSTU)


KINDS = {"hstu": hstu("bf16"), "hstu of f16": hstu("f16", ", table"), "relu": RELU, "linear": LINEAR}


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("kind", "target"), some_by_day(KINDS, EACH, of=2))
def test_weights(kind: str, target: str) -> None:
    skip_without_compiler(target)
    right_by_day(subject_of_text(spec(KINDS[kind], small_tiles(target), target=target)), count=2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", EACH)
def test_weights_of_packed_rows(target: str) -> None:
    skip_without_compiler(target)
    made = subject_of_text(spec(PACKED, small_tiles(target), target=target))
    assert_within_bound(made, Case(dims={"B": 3, "M": 21, "N": 21, "H": 2}))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("way", ["atomic", "sequential"])
def test_dq_in_memory(way: str, target: str) -> None:
    skip_without_compiler(target)
    schedule = f"{small_tiles(target)}\n  backward {{ accumulate.dq = {way} }}"
    made = subject_of_text(spec(LINEAR, schedule, target=target))
    assert_within_bound(made, Case(dims={"B": 2, "M": 37, "N": 21, "H": 2}))


@needs_gxx
@pytest.mark.slow
def test_weights_where_warps_share_keys() -> None:
    made = subject_of_text(
        spec(hstu("bf16"), "tile.q = 16, tile.kv = 64, warps = 2, warp_split = kv", target="cuda.sm_80")
    )
    assert_within_bound(made, Case(dims={"B": 2, "M": 37, "N": 37, "Hkv": 1, "G": 2}))


def causal(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("mask = causal" if line.startswith("mask") else line for line in lines)


def widen(lines: tuple[str, ...], columns: int) -> tuple[str, ...]:
    return tuple(line.replace("16]", f"{columns}]").replace("24]", f"{columns}]") for line in lines)


@pytest.mark.one_in(4)
@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "columns", "accumulate"),
    [
        pytest.param(hstu("bf16"), 64, "two_pass", id="hstu"),
        pytest.param(hstu("f16", ", table"), 96, "two_pass", id="hstu of f16", marks=pytest.mark.nightly),
        pytest.param(RELU, 128, "two_pass", id="relu", marks=pytest.mark.nightly),
        pytest.param(RELU, 160, "two_pass", id="wide"),
        pytest.param(causal(LINEAR), 64, "ordered", id="linear"),
        pytest.param(LINEAR, 128, "atomic", id="atomic", marks=pytest.mark.nightly),
        pytest.param(PACKED, 128, "two_pass", id="packed", marks=pytest.mark.nightly),
    ],
)
def test_weights_on_hopper(lines: tuple[str, ...], columns: int, accumulate: str) -> None:
    schedule = f"order = longest_first\n  backward {{ accumulate.dq = {accumulate} }}"
    made = subject_of_text(spec(widen(lines, columns), schedule, target="cuda.sm_90a"))
    rows = {"M": 70, "N": 70} if lines is PACKED or "lens" in str(lines) else {"M": 70, "N": 133}
    assert_within_bound(made, Case(dims={"B": 2, "H": 2, "Hkv": 1, "G": 2, **rows}))


#: Keys that a decode schedule splits: a weight of 0 is no key that is left out.
CACHED = (
    "input q: bf16[B, M, Hkv * G, 16]",
    "input k, v: bf16[B, N, Hkv, 16]",
    "input lens: i32[B]",
    "length N = lens[b]",
    "score = dot(q, k) / sqrt(D)",
    "weight = score * sigmoid(score) / N",
    "mask = causal",
    "normalize = none",
    "output o: bf16[B, M, Hkv * G, 16]",
)
IN_PAGES = (
    "input q: f16[B, M, H, 24]",
    "input k, v: f16[B, N, H, 24] via paged(pages, page = 16)",
    "input pages: i32[B, P]",
    "input lens: i32[B]",
    "length N = lens[b]",
    "score = dot(q, k) / sqrt(D)",
    "weight = sigmoid(score) / 8",
    "mask = window(20, 0)",
    "normalize = none",
    "output o: f16[B, M, H, 24]",
)


#: A key that is infinitely far has no weight, whatever its value; rows of o past a length are zeros.
SHORTENED = (
    "input q: bf16[B, M, H, 136]",
    "input k, v: bf16[B, N, H, 136]",
    "input bias: f32[H, N]",
    "input lens, queries: i32[B]",
    "length N = lens[b]",
    "length M = queries[b]",
    "score = dot(q, k) / 8 + bias[h, kv_idx]",
    "weight = max(score, 0) * max(score, 0)",
    "mask = kv_idx % 3 != 1 and causal",
    "normalize = none",
    "output o: bf16[B, M, H, 136]",
)
#: Tiles of decode kernels; on sm_80 warps have rows, or keys, whose sums of wide heads every tile adds.
DECODING = {
    "triton": ("tile.kv = 16",),
    "cuda.sm_80": (
        "tile.q = 16, tile.kv = 16, warps = 1, warp_split = q, stages = 2",
        "tile.q = 16, tile.kv = 32, warps = 2, warp_split = kv, stages = 2",
    ),
    "cuda.sm_90a": ("tile.kv = 16, stages = 2",),
}
EVERY_DECODING = [(target, tiles) for target, found in DECODING.items() for tiles in found]


STORED = {"cache": CACHED, "pages": IN_PAGES, "lengths": SHORTENED}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("split", "stored", "decoding"),
    some_by_day(["1", "3", "fixed(32)"], STORED, range(len(EVERY_DECODING)), of=3),
)
def test_splits_are_added(split: str, stored: str, decoding: int) -> None:
    target, tiles = EVERY_DECODING[decoding]
    skip_without_compiler(target)
    schedule = f"loops = [kv], pack = gqa, {tiles}, split.kv = {split}"
    made = subject_of_text(spec(STORED[stored], schedule, target=target))
    dims = {"B": 3, "M": 3, "N": 77, "Hkv": 2, "G": 2, "H": 2}
    for lengths in ("drawn", "one"):  # rows past a length, in sequences that have keys
        assert_within_bound(made, Case(dims=dims, lengths=lengths))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("target", "tiles"), EVERY_DECODING)
def test_weights_of_a_cache(target: str, tiles: str) -> None:
    skip_without_compiler(target)
    schedule = f"loops = [kv], pack = gqa, {tiles}, split.kv = 3"
    right_by_day(subject_of_text(spec(CACHED, schedule, target=target)), count=2 if target == "triton" else 1)
