"""f32 on tensor cores: products of three of tf32 are as exact as the bound says, and kernels are right."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.model.resolve import resolve
from attnc.model.variants import variants
from attnc.plan.error_bound import TF32X3_PRODUCT_ERROR
from attnc.plan.lower import plan
from attnc.reference import Array
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.verify.interpreter import f32_to_tf32
from attnc.verify.simt import available
from attnc.verify.subject import subject_of
from tests.by_day import some_by_day
from tests.verify.judging import right_by_day

SPEC = """
attention under_test {{
  input q: f32[B, Hkv * G, M, {d}]
  input k: f32[B, Hkv, N, {d}]
  input v: f32[B, Hkv, N, {dv}]
  {inputs}
  score = {score}
  mask = {mask}
  normalize = {softmax}
  output o: f32[B, Hkv * G, M, {dv}]
  output lse: f32[B, Hkv * G, M]
  {grads}
}}
schedule under_test for cuda.sm_80 {{
{schedule}
}}
"""
SLOPES = {
    "inputs": "input slope: f32[Hkv * G]\n  input bias: bf16[Hkv * G, N]",
    "score": "dot(q, k) / sqrt(D) + slope[h] * (kv_idx - q_pos) + bias[h, kv_idx]",
    "grads": "grad q, k, v, slope, bias",
}
DROPOUT = {
    "inputs": "input p: f32[]\n  input seed: i64[]",
    "softmax": "softmax(dropout = p, seed = seed)",
    "grads": "grad q, k, v",
}
Q_K_V = {"grads": "grad q, k, v"}
SMALL = "tile.q = 32, tile.kv = 32, warps = 2"
FA1 = f"loops = [kv, q], {SMALL}, softmax = online(rescale = every_step)"
CASES: dict[str, tuple[str, int, int, dict[str, str]]] = {
    "split-Q": (f"{SMALL}, stages = 1", 64, 64, {}),
    "split-K": ("tile.q = 32, tile.kv = 64, warp_split = kv", 72, 16, {}),
    "outside in": (FA1, 24, 40, {"mask": "causal"}),
    "outside in, split-K": (f"{FA1}, warp_split = kv", 72, 72, {}),
    "two passes": ("softmax = two_pass", 256, 256, {}),
    "decode": ("loops = [kv], split.kv = 3, pack = gqa, tile.q = 16, warp_split = kv", 64, 64, {}),
    "decode, split-Q": ("loops = [kv], split.kv = 2, pack = gqa, tile.q = 16, warps = 1", 32, 24, {}),
    "unified": (
        "loops = [kv], tile.q = 16, warp_split = kv, softmax = unified_max(phi = 0, bounds = [-60, 60])",
        64,
        64,
        {},
    ),
    "dq apart": ("", 64, 64, {"mask": "causal", **Q_K_V}),
    "atomic dq": ("backward { accumulate.dq = atomic }", 32, 64, {"mask": "causal", **Q_K_V}),
    "shared keys": ("backward { accumulate.dq = atomic, warp_split = q }", 72, 40, SLOPES),
    "sequential dq": ("backward { accumulate.dq = sequential }", 32, 32, Q_K_V),
    "dropout": ("backward { warp_split = q }", 64, 64, DROPOUT),
    "wide": ("", 256, 256, Q_K_V),
}


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize("name", some_by_day(CASES, of=6))
def test_kernels_are_right(name: str) -> None:
    schedule, d, dv, rest = CASES[name]
    plain = {"inputs": "", "score": "dot(q, k) / sqrt(D)", "mask": "true", "softmax": "softmax", "grads": ""}
    text = SPEC.format(schedule=schedule, d=d, dv=dv, **{**plain, **rest})
    program = resolve(parse(Source("under_test.attn", text)), prelude())
    (variant,) = variants(program, program.attentions[0])
    right_by_day(subject_of(plan(variant, program.schedules[0])), count=2)


def parts(x: Array) -> tuple[Array, Array]:
    """The two tf32 that kernels split an f32 into, and tensor cores read."""

    def upwards(value: Array) -> Array:
        return (value.astype(np.float64) * (1 + 2.0**-11)).astype(np.float32)

    large = f32_to_tf32(upwards(x))
    return large, f32_to_tf32(upwards((x - large).astype(np.float32)))


def test_products_are_as_exact_as_the_bound_says() -> None:
    rng = np.random.default_rng(0)
    edges = np.float32(1) + np.arange(2**14, dtype=np.float32) * np.float32(2.0**-23)
    a, b = (np.concatenate([edges, -edges[::-1] * 1.9, rng.standard_normal(2**20)]) for _ in range(2))
    a, b = a.astype(np.float32), rng.permutation(b).astype(np.float32)
    a_large, a_small = (part.astype(np.float64) for part in parts(a))
    b_large, b_small = (part.astype(np.float64) for part in parts(b))
    assert (np.abs(a_small) <= 2.0**-11 * (1 + 2.0**-10) * np.abs(a)).all()
    assert (np.abs(a_large + a_small - a) <= 2.0**-22 * (1 + 2.0**-9) * np.abs(a)).all()
    exact = a.astype(np.float64) * b
    product = a_large * b_large + a_small * b_large + a_large * b_small
    worst = float((np.abs(product - exact) / np.abs(exact)).max())
    assert 2.0**-23 < worst < TF32X3_PRODUCT_ERROR
