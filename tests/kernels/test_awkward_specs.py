"""Specs that are awkward, or were once compiled wrongly, from text to result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attnc.reference import Floats
from attnc.verify import problem
from attnc.verify.case import Case
from attnc.verify.data import DenseSizes, draw_qkv
from attnc.verify.strategies import free_dims
from attnc.verify.subject import Subject
from tests.by_day import each_by_day
from tests.targets import EACH, TARGETS, needs_gxx, skip_without_compiler
from tests.verify.judging import assert_within_bound, spec, subject_of_text

SCORE, SOFTMAX = "score = dot(q, k) / 4", "normalize = softmax"
KV_Q = "loops = [kv, q], softmax = online(rescale = every_step)"
TILES, TWO_WARPS = "tile.q = 16, tile.kv = 16", "tile.q = 32, tile.kv = 32, warps = 2"


def small(
    *lines: str,
    dtype: str = "f32",
    heads: str = "H",
    kv_heads: str = "H",
    schedule: str = "",
    target: str = "triton",
) -> Subject:
    """An attention over ordinary tensors, of these statements besides; schedule: settings, tiles if it names
    none.
    """
    tensors = (
        f"input q: {dtype}[B, M, {heads}, 16]",
        f"input k, v: {dtype}[B, N, {kv_heads}, 16]",
        f"output o: {dtype}[B, M, {heads}, 16]",
    )
    settings = schedule if "tile" in schedule else f"{schedule}\n  {TILES}"
    return subject_of_text(spec((*tensors, *lines, SOFTMAX), settings, target=target))


AWKWARD = {
    "fixed heads": ((SCORE,), ("4", "2"), ""),
    "twice the KV heads": ((SCORE,), ("2 * Hkv", "Hkv"), ""),
    "two KV heads": ((SCORE,), ("2 * G", "2"), ""),
    "a head count like another number": (("mask = kv_idx % 2 == 0", SCORE), ("2", "1"), ""),
    "as many heads as features": ((SCORE,), ("16", "16"), ""),
    "heads spelled backwards": (
        ("input x: f32[G * Hkv]", "score = dot(q, k) + x[h]"), ("Hkv * G", "Hkv"), ""
    ),
    "a table of the groups": (
        ("input x: f32[Hkv, G]", "score = dot(q, k) + x[h // G, h % G]"), ("Hkv * G", "Hkv"), ""
    ),
    "lengths outside in": (
        ("input n_len, m_len: i32[B]", "length N = n_len[b]", "length M = m_len[b]", "mask = causal", SCORE),
        ("H", "H"), KV_Q,
    ),
    "a sink outside in": (
        ("input x: f32[H]", "input m_len: i32[B]", "length M = m_len[b]", SCORE), ("H", "H"), KV_Q
    ),
    "sizes called like values": (
        ("input x: f32[H, x_kv]", "input y: f32[t]", "grad q, k, v",
         "score = softcap(dot(q, k), 3) + x[h, min(kv_idx, x_kv - 1)] + y[min(q_idx, t - 1)]"), ("H", "H"), ""
    ),
    "functions of integers": (("score = dot(q, k) * log(q_idx + 1) + sqrt(N)",), ("H", "H"), ""),
    "functions of constants": (("score = dot(q, k) + exp(-1000) - tanh(2)",), ("H", "H"), ""),
    "divisors of any sign": (
        ("input by: i32[B]", "mask = kv_idx // by[b] <= q_idx % -3 + 5 and kv_idx % by[b] >= kv_idx // 2 - 9",
         "score = dot(q, k) + q_pos % by[b] - min(kv_idx, h) // -3"), ("H", "H"), ""
    ),
    "integers of 64 bits": (
        ("input n_len, w: i64[B]", "length N = n_len[b]",
         "mask = window(w[b], 9999999999) or kv_idx % 9999999999 == abs(q_pos - 9999999999) // w[b]",
         "score = dot(q, k) + min(w[b], kv_idx) * 10000000000 / 1e12"), ("H", "H"), ""
    ),
    "bounds far outside": (
        ("mask = kv_idx >= q_pos * 100000000 and kv_idx * 7 <= 10000000000 - q_pos", SCORE), ("H", "H"), ""
    ),
    "a score without a product": (("score = 0.5 * q_pos",), ("H", "H"), ""),
    "a constant score": (("mask = causal", "score = 1"), ("H", "H"), ""),
    "a condition of the sequence alone": (
        ("input flag: bool[B]", "mask = not flag[b] and kv_idx < 20", SCORE), ("H", "H"), ""
    ),
    "names of the kernel": (
        (
            "input head, tile, page, h_kv, q_rows: i32[B]", "input shift, Q, TMA, m_new: f32[H]",
            "length M = q_rows[b]", "mask = kv_idx + tile[b] >= page[b] - head[b] * h_kv[b]",
            "score = dot(q, k) + shift[h] * Q[h] - TMA[h] * m_new[h]",
        ),
        ("Hkv * G", "Hkv"), "softmax = two_pass",
    ),
    "a name and its pointer": (
        ("input x, x_ptr: f32[H]", "score = dot(q, k) + x[h] - x_ptr[h]"), ("H", "H"), ""
    ),
}  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", each_by_day(AWKWARD, of=2))
def test_awkward_specs(name: str) -> None:
    lines, (heads, kv_heads), schedule = AWKWARD[name]
    if not any(line.startswith("score") for line in lines):
        lines = (*lines, SCORE)
    made = small(*lines, f"output lse: f32[B, {heads}, M]", heads=heads, kv_heads=kv_heads, schedule=schedule)
    sizes = {"B": 2, "M": 21, "N": 37, "H": 2, "Hkv": 2, "G": 2, "x_kv": 7, "t": 9}
    case = Case(dims={dim: sizes[dim] for dim in free_dims(made.variant.attention)}, seed=5)
    for special in ("none", "nan_q"):
        assert_within_bound(made, replace(case, special=special))


_PLAIN = "input q: f32[B, M, H, 16]", "input k, v: f32[B, N, H, 16]"
_PACKED = "input q: f32[T, H, 16] via ragged(ends)", "input k, v: f32[B, N, H, 16]", "input ends: i32[B + 1]"
#: Inputs and the rest, the schedule, and sizes at which it once went wrong.
MENDED = {
    "persistent programs for packed rows": (
        (*_PACKED, SCORE, SOFTMAX, "output o: f32[T, H, 16]"), "persistent = true", {"M": 29, "N": 5}
    ),
    "gradients where no row is": (
        (*_PACKED, SCORE, SOFTMAX, "output o: f32[T, H, 16]", "grad q"), "", {"M": 0, "N": 0}
    ),
    "gradients after FlashAttention-1's order": (
        (*_PLAIN, SCORE, SOFTMAX, "output o: f32[B, M, H, 16]", "grad q"), KV_Q, {"M": 21, "N": 21}
    ),
    "gradients of a score without a product": (
        (*_PLAIN, "input x: f32[M]", "score = x[q_idx]", SOFTMAX, "output o: f32[B, M, H, 16]",
         "grad q, x, v"), "", {"M": 21, "N": 21},
    ),
    "rows that a length cuts off, of an input": (
        (*_PLAIN, "input x: f32[B, M]", "input m_len: i32[B]", "length M = m_len[b]", SOFTMAX,
         "score = dot(q, k) + x[b, q_idx]", "output o: f32[B, M, H, 16]", "grad x"),
        "", {"M": 37, "N": 21},
    ),
    "an input that only a condition reads": (
        (*_PLAIN, "input x: bf16[]", "score = where(x > 0, dot(q, k), q_idx / 8)", SOFTMAX,
         "output o: f32[B, M, H, 16]", "grad q, x"),
        "", {"M": 21, "N": 21},
    ),
    "nothing but what a condition reads": (
        (*_PLAIN, "input x: bf16[]", "score = where(x > 0, dot(q, k), q_idx / 8)", SOFTMAX,
         "output o: f32[B, M, H, 16]", "grad x"),
        "", {"M": 21, "N": 21},
    ),
    "a factor that is 0 in float32": (
        (*_PLAIN, "mask = causal", "score = dot(q, k) * 1e-46", SOFTMAX, "output o: f32[B, M, H, 16]",
         "grad q, k, v"),
        "", {"M": 37, "N": 37},
    ),
    "products below the normal numbers": (
        (*_PLAIN, "input x: f32[H]", "score = dot(q, k) * 1e-38 * x[h] * 1e38", SOFTMAX,
         "output o: f32[B, M, H, 16]", "grad q, x"),
        "", {"M": 21, "N": 37},
    ),
    "decoding of shortened rows": (
        (*_PLAIN, "input m_len: i32[B]", SCORE, "length M = m_len[b]", SOFTMAX, "output o: f32[B, M, H, 16]"),
        "loops = [kv], split.kv = 1", {"M": 21, "N": 37},
    ),
    "inputs as long as pages, and as packed queries": (
        ("input q: f32[T, H, 16] via ragged(ends)", "input k, v: f32[B, N, H, 16] via paged(slots, page = 3)",
         "input ends: i32[B + 1]", "input slots: i32[B, P]", "input x: f32[M, N]", "input y: f32[B, M]",
         "score = dot(q, k) + y[b, q_idx] + x[q_idx, kv_idx]", "length N = N - M", SOFTMAX,
         "output o: f32[T, H, 16]"),
        "", {"M": 21, "N": 37},
    ),
    "a length behind a length, which ends what it reads": (
        (*_PLAIN, "input keys: i32[M]", SCORE, "length M = 3", "length N = keys[5] + 2", SOFTMAX,
         "output o: f32[B, M, H, 16]"),
        "", {"M": 21, "N": 37},
    ),
    "the last key of sequences that have none": (
        ("input q: f32[T, H, 16] via ragged(ends)", "input k, v: f32[S, H, 16] via ragged(k_ends)",
         "input ends, k_ends: i32[B + 1]", "input x: i32[N] is sorted", "mask = x[kv_idx] >= q_idx",
         SCORE, SOFTMAX, "output o: f32[T, H, 16]", "grad k"),
        "", {"M": 21, "N": 5},
    ),
    "sizes of packed keys in a gradient": (
        ("input q: f32[T, H, 16] via ragged(ends)", "input k, v: f32[S, H, 16] via ragged(k_ends)",
         "input ends, k_ends: i32[B + 1]", "input x: f32[B, N]", "score = x[b, kv_idx]", SOFTMAX,
         "output o: f32[T, H, 16]", "grad q, k, x"),
        "", {"M": 21, "N": 37},
    ),
}  # fmt: skip


@pytest.mark.one_in(4)
@needs_gxx
@pytest.mark.parametrize("wanted", ["q", "k", "v", "q, k", "k, v"])
def test_some_gradients_on_cuda(wanted: str) -> None:
    """A schedule that names no tiles of the backward gets those that suit what it makes."""
    made = small(SCORE, f"grad {wanted}", dtype="f16", schedule=TWO_WARPS, target="cuda.sm_80")
    assert_within_bound(made, Case(dims={"B": 1, "M": 21, "N": 37, "H": 1}, seed=5))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("loads", ["x[h, M - q_idx]", "y[M - q_idx, q_pos - kv_idx]", "y[q_idx, N - kv_idx]"])
def test_subscripts_that_end_with_an_index(loads: str, target: str) -> None:
    """The whole difference is multiplied by the stride, not what is subtracted."""
    declared = {"x": "input x: f32[H, M]", "y": "input y: f32[M, N]"}[loads[0]]
    lines = (declared, f"score = dot(q, k) / 4 + {loads}", f"grad q, {loads[0]}")
    made = small(*lines, dtype="f16", schedule=TWO_WARPS, target=target)
    assert_within_bound(made, Case(dims={"B": 2, "M": 21, "N": 37, "H": 2}, seed=5))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MENDED)
def test_specs_that_were_once_wrong(name: str) -> None:
    lines, schedule, lengths = MENDED[name]
    made = subject_of_text(spec(lines, f"{schedule}\n  {TILES}"))
    sizes = {"B": 2, "H": 2, **lengths}
    assert_within_bound(
        made, Case(dims={dim: sizes[dim] for dim in free_dims(made.variant.attention)}, seed=5)
    )


#: Integers of 64 bits far outside of the keys, and products of smaller ones.
_FAR = {"loaded": ("i64", "x[b] < kv_idx", 1 << 32), "multiplied": ("i32", "x[b] * 1000 < kv_idx", 4294967)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", _FAR)
def test_bounds_beyond_32_bits(name: str, target: str) -> None:
    """Bounds are kept in 32 bits, and so have to come back among the keys first."""
    skip_without_compiler(target)
    dtype, mask, far = _FAR[name]
    lines = (f"input x: {dtype}[B]", SCORE, f"mask = {mask}")
    made = small(*lines, dtype="f16", schedule=TWO_WARPS, target=target)
    x = torch.tensor([-far, far, 2 * far])
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, n, 1, 16, dtype=torch.float16) for n in (33, 70, 70))
    o = torch.empty_like(q)
    made.run({"q": q, "k": k, "v": v, "x": x.to(torch.int64 if dtype == "i64" else torch.int32)}, {"o": o})
    whole = torch.softmax(torch.einsum("mhd,nhd->hmn", q[0].float(), k[0].float()) / 4, -1)
    torch.testing.assert_close(
        o[0].float(), torch.einsum("hmn,nhd->mhd", whole, v[0].float()), atol=2e-3, rtol=0
    )
    assert not o[1:].any()  # no key is that far


#: The last two in rows past the last one alone, which is row 26 at position 36.
_PAST = (
    "sqrt(abs(dot(q, k)))",
    "dot(q, k) / (4 * x[q_idx])",
    "dot(q, k) * exp(60 * (q_pos - 36))",
    "dot(q, k) - where(q_idx > 26, -inf, 0)",
)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("score", "target"), [*((score, "triton") for score in _PAST), *((s, "cuda.sm_80") for s in _PAST[:3])]
)
def test_scores_that_are_no_numbers_past_the_end(score: str, target: str) -> None:
    """Rows past the end are zeros, where these scores or their slopes are infinite or NaN."""
    skip_without_compiler(target)
    lines = ("input x: f32[M]", f"score = {score}", "grad q, k, v")
    made = small(*lines, dtype="f16", schedule=TWO_WARPS, target=target)
    assert_within_bound(made, Case(dims={"B": 1, "M": 27, "N": 37, "H": 2}, seed=5))


def test_a_unified_maximum_keeps_nan() -> None:
    """In rows of a shortened sequence, which are cleared where there is no query."""
    schedule = "loops = [kv], softmax = unified_max(phi = 0, bounds = [-6, 6], fallback = online)"
    made = small("length M = M", SCORE, schedule=schedule)
    assert_within_bound(made, Case(dims={"B": 1, "M": 3, "N": 5, "H": 1}, special="nan_q"))


def test_minima_keep_nan() -> None:
    made = small("score = max(dot(q, k), 0.5)")
    assert_within_bound(made, Case(dims={"B": 1, "M": 17, "N": 5, "H": 1}, special="nan_q"))


@needs_gxx
def test_queries_without_keys_wait_for_their_copy() -> None:
    """With one stage no copy of a tile follows that of q, and o leaves through its place."""
    lines = (
        "input q: f16[B, M, H, 16]",
        "input k: f16[B, N, H, 16]",
        "input v: f16[B, N, H, 16] via prefix(k)",
        *(SCORE, SOFTMAX, "output o: f16[B, M, H, 16]"),
    )
    made = subject_of_text(spec(lines, f"{TWO_WARPS}, stages = 1", target="cuda.sm_80"))
    assert_within_bound(made, Case(dims={"B": 1, "M": 21, "N": 0, "H": 1}, seed=5))


SLOPED = "dot(q, k) - slope[h] * (q_pos - kv_idx)"
#: The last key is seen by no row, or by one to which it is not sloped.
STEEP = {
    "softpick": (SLOPED, "kv_idx < q_pos"),
    "softmax": (f"where(kv_idx == q_pos, dot(q, k), {SLOPED})", "causal"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("form", STEEP)
def test_an_infinite_slope_reaches_no_key_from_rows_that_do_not_exist(form: str, target: str) -> None:
    skip_without_compiler(target)
    score, mask = STEEP[form]
    lines = (
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64]",
        "input slope: f32[H]",
        f"score = {score}",
        f"mask = {mask}",
        f"normalize = {form}",
        "output o: bf16[B, M, H, 64]",
        "grad q, k, v, slope",
    )
    made = subject_of_text(spec(lines, "", target=target))
    assert_within_bound(made, Case(dims={"B": 1, "M": 1, "N": 1, "H": 8}, extras="steep"))


#: Masks under which a row behind the last one would see a key that none sees.
STRICT = ("kv_idx < q_pos", "kv_idx < q_pos and kv_idx // 3 != q_pos // 3")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("mask", STRICT)
def test_the_newest_key_may_be_anything_where_no_row_sees_it(
    mask: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_compiler(target)
    lines = (
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64]",
        "score = dot(q, k) / sqrt(D)",
        f"mask = {mask}",
        "normalize = softmax",
        "output o: bf16[B, M, H, 64]",
        "grad q, k, v",
    )
    draw = draw_qkv

    def with_a_newest(at: DenseSizes, **styles: Any) -> dict[str, Floats]:
        drawn = draw(at, **styles)
        drawn["k"][:, -1] = np.nan
        return drawn

    monkeypatch.setattr(problem, "draw_qkv", with_a_newest)
    made = subject_of_text(spec(lines, "", target=target))
    assert_within_bound(made, Case(dims={"B": 1, "M": 5, "N": 9, "H": 2}))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", EACH)
def test_infinite_entries_of_a_table_that_no_row_reads_reach_nothing(target: str) -> None:
    skip_without_compiler(target)
    lines = (
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64]",
        "input table: f32[H, 64]",
        "score = dot(q, k) / sqrt(D) + table[h, q_idx - kv_idx + 32]",
        "normalize = softmax",
        "output o: bf16[B, M, H, 64]",
        "grad q, k, v, table",
    )
    made = subject_of_text(spec(lines, "", target=target))
    for seed in range(3):
        assert_within_bound(made, Case(dims={"B": 1, "M": 1, "N": 5, "H": 8}, extras="endless", seed=seed))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", EACH)
def test_a_clipped_distance_is_an_integer_of_its_size(target: str) -> None:
    """Of 32 bits, also in the simulator, beside constants."""
    skip_without_compiler(target)
    lines = (
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64]",
        "input table: f32[H, 8]",
        "score = dot(q, k) / sqrt(D) + table[h, min(abs(q_pos - kv_idx), 7)]",
        "normalize = softmax",
        "output o: bf16[B, M, H, 64]",
    )
    assert_within_bound(
        subject_of_text(spec(lines, "", target=target)), Case(dims={"B": 1, "M": 3, "N": 70, "H": 2})
    )
