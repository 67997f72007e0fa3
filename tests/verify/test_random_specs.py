"""Whole random specs, from text to result; and specs that were once compiled wrongly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from attnc.build import plan_program
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse
from attnc.syntax.prelude import prelude
from attnc.verify.agreement import across
from attnc.verify.check import Subject, check
from attnc.verify.simt import available
from attnc.verify.strategies import Case, cases, free_dims
from attnc.verify.subjects import subject_of
from tests.verify.random_specs import specs


def subject(text: str) -> Subject:
    (module,) = plan_program(resolve(parse(Source("spec.attn", text)), prelude())).modules
    return subject_of(module)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(specs(), st.data())
def test_kernels_agree_with_the_reference(text: str, data: st.DataObject) -> None:
    note(text)
    made = subject(text)
    case = data.draw(cases(made.variant, replace(made.limits(), longest=50, work=16)))
    if any(max(layout.gaps) > 100 for layout in case.layouts.values()):
        case = replace(case, layouts={})  # rows gigabytes apart have a test of their own, and take a second
    verdict = check(made, case)
    assert verdict.ok, verdict.message


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="g++ compiles CUDA kernels for the CPU")
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(specs(on_cuda=True), st.data())
def test_targets_agree(text: str, data: st.DataObject) -> None:
    """Triton, CUDA and the reference, each within the bound of its plan, and the kernels with each other."""
    note(text)
    modules = plan_program(resolve(parse(Source("spec.attn", text)), prelude())).modules
    made = {module.target: subject_of(module) for module in modules}
    triton, cuda = made["triton"], made["cuda.sm_80"]
    case = data.draw(cases(cuda.variant, replace(cuda.limits(), longest=50, work=16)))
    if any(max(layout.gaps) > 100 for layout in case.layouts.values()):
        case = replace(case, layouts={})
    for subject_ in (triton, cuda):
        verdict = check(subject_, replace(case, config=case.config % len(subject_.configs)))
        assert verdict.ok, verdict.message
    assert not list(across({"triton": triton})(cuda, case))


FRAME = """attention spec {{
  input q: f32[B, M, {heads}, 16]
  input k, v: f32[B, N, {kv_heads}, 16]
  {lines}
  output o: f32[B, M, {heads}, 16]
  output lse: f32[B, {heads}, M]
}}
schedule spec for triton {{
  {schedule}
  tile.q = 16, tile.kv = 16
}}
"""
SCORE, SOFTMAX = "score = dot(q, k) / 4", "normalize = softmax"
KV_Q = "loops = [kv, q], softmax = online(rescale = every_step)"
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


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_specs(name: str) -> None:
    lines, (heads, kv_heads), schedule = AWKWARD[name]
    if not any(line.startswith("score") for line in lines):
        lines = (*lines, SCORE)
    text = FRAME.format(
        heads=heads,
        kv_heads=kv_heads,
        lines="\n  ".join((*lines, SOFTMAX)),
        schedule=schedule or "loops = [q, kv]",
    )
    made = subject(text)
    sizes = {"B": 2, "M": 21, "N": 37, "H": 2, "Hkv": 2, "G": 2}
    case = Case(dims={dim: sizes[dim] for dim in free_dims(made.variant.attention)}, seed=5)
    for special in ("none", "nan_q"):
        verdict = check(made, replace(case, special=special))
        assert verdict.ok, verdict.message


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
    "sizes of packed keys in a gradient": (
        ("input q: f32[T, H, 16] via ragged(ends)", "input k, v: f32[S, H, 16] via ragged(k_ends)",
         "input ends, k_ends: i32[B + 1]", "input x: f32[B, N]", "score = x[b, kv_idx]", SOFTMAX,
         "output o: f32[T, H, 16]", "grad q, k, x"),
        "", {"M": 21, "N": 37},
    ),
}  # fmt: skip


@pytest.mark.skipif(not available(), reason="g++ compiles CUDA kernels for the CPU")
@pytest.mark.parametrize("wanted", ["q", "k", "v", "q, k", "k, v"])
def test_some_gradients_on_cuda(wanted: str) -> None:
    """A schedule that names no tiles of the backward gets those that suit what it makes."""
    text = f"""attention spec {{
  input q: f16[B, M, H, 16]
  input k, v: f16[B, N, H, 16]
  {SCORE}
  {SOFTMAX}
  output o: f16[B, M, H, 16]
  grad {wanted}
}}
schedule spec for cuda.sm_80 {{
  tile.q = 32, tile.kv = 32, warps = 2
}}
"""
    verdict = check(subject(text), Case(dims={"B": 1, "M": 21, "N": 37, "H": 1}, seed=5))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("name", MENDED)
def test_specs_that_were_once_wrong(name: str) -> None:
    lines, schedule, lengths = MENDED[name]
    statements, rest = "\n  ".join(lines), schedule or "loops = [q, kv]"
    text = f"attention spec {{\n  {statements}\n}}\n"
    text += f"schedule spec for triton {{\n  {rest}\n  {_SMALL}\n}}\n"
    made = subject(text)
    sizes = {"B": 2, "H": 2, **lengths}
    verdict = check(made, Case(dims={dim: sizes[dim] for dim in free_dims(made.variant.attention)}, seed=5))
    assert verdict.ok, verdict.message


_SMALL = "tile.q = 16, tile.kv = 16"
#: Integers of 64 bits far outside of the keys, and products of smaller ones.
_FAR = {"loaded": ("i64", "x[b] < kv_idx", 1 << 32), "multiplied": ("i32", "x[b] * 1000 < kv_idx", 4294967)}


@pytest.mark.parametrize("target", ["triton", "cuda.sm_80"])
@pytest.mark.parametrize("name", _FAR)
def test_bounds_beyond_32_bits(name: str, target: str) -> None:
    """Bounds are kept in 32 bits, and so have to come back among the keys first."""
    if target != "triton" and not available():
        pytest.skip("g++ compiles CUDA kernels for the CPU")
    dtype, mask, far = _FAR[name]
    text = f"""attention spec {{
  input q: f16[B, M, H, 16]
  input k, v: f16[B, N, H, 16]
  input x: {dtype}[B]
  {SCORE}
  mask = {mask}
  {SOFTMAX}
  output o: f16[B, M, H, 16]
}}
schedule spec for {target} {{
  tile.q = 32, tile.kv = 32, warps = 2
}}
"""
    (module,) = plan_program(resolve(parse(Source("spec.attn", text)), prelude())).modules
    made = subject_of(module)
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


@pytest.mark.parametrize("target", ["triton", "cuda.sm_80"])
@pytest.mark.parametrize("score", ["sqrt(abs(dot(q, k)))", "dot(q, k) / (4 * x[q_idx])"])
def test_scores_that_are_no_numbers_past_the_end(score: str, target: str) -> None:
    """Rows past the end are zeros, where these scores or their slopes are infinite or NaN."""
    if target != "triton" and not available():
        pytest.skip("g++ compiles CUDA kernels for the CPU")
    text = f"""attention spec {{
  input q: f16[B, M, H, 16]
  input k, v: f16[B, N, H, 16]
  input x: f32[M]
  score = {score}
  {SOFTMAX}
  output o: f16[B, M, H, 16]
  grad q, k, v
}}
schedule spec for {target} {{
  tile.q = 32, tile.kv = 32, warps = 2
}}
"""
    verdict = check(subject(text), Case(dims={"B": 1, "M": 27, "N": 37, "H": 2}, seed=5))
    assert verdict.ok, verdict.message


def test_a_unified_maximum_keeps_nan() -> None:
    """In rows of a shortened sequence, which are cleared where there is no query."""
    lines = f"length M = M\n  {SCORE}\n  {SOFTMAX}"
    schedule = "loops = [kv], softmax = unified_max(phi = 0, bounds = [-6, 6], fallback = online)"
    made = subject(FRAME.format(heads="H", kv_heads="H", lines=lines, schedule=schedule))
    verdict = check(made, Case(dims={"B": 1, "M": 3, "N": 5, "H": 1}, special="nan_q"))
    assert verdict.ok, verdict.message


def test_minima_keep_nan() -> None:
    text = FRAME.format(
        heads="H", kv_heads="H", lines=f"score = max(dot(q, k), 0.5)\n  {SOFTMAX}", schedule="loops = [q, kv]"
    )
    verdict = check(subject(text), Case(dims={"B": 1, "M": 17, "N": 5, "H": 1}, special="nan_q"))
    assert verdict.ok, verdict.message
