"""Capped scores by a polynomial: what it is off by where it is used, and what is lost beyond."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from attnc.build import plan_program
from attnc.expr.nodes import Binary, Call, Const, Dot, Expr, Index
from attnc.model.resolve import resolve
from attnc.plan.sm90.softcap import _FACTORS, LIMIT, POLYNOMIAL, TAIL, Cap, cap_of, polynomial
from attnc.plan.sm90.target import layout_of
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target.sm80.printer import at_row

S = Dot()
SPEC = """attention a {{
  input q: bf16[B, M, H, 64]
  input k, v: bf16[B, N, H, 64]
  score = {score}
  normalize = softmax
  output o: bf16[B, M, H, 64]
}}
schedule a for cuda.sm_90a {{
  softmax = {softmax}
}}
"""


def capped(size: float, factor: float, score: Expr = S) -> Expr:
    return Binary("*", Call("tanh", (Binary("*", score, Const(factor)),)), Const(size))


def found(size: float, factor: float, scale: float | None = None) -> Cap:
    cap = cap_of(capped(size, factor), scale)
    assert cap is not None
    return cap


def grown(x: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The polynomial of many arguments."""
    a, b, c = POLYNOMIAL
    return x * (a + x * x * (b + x * x * c))


@pytest.mark.parametrize(("size", "factor"), [(43.3, 0.0029), (100.0, -0.01), (-72.0, 0.001)])
def test_near_zero_it_is_as_exact_as_any_tanh(size: float, factor: float) -> None:
    """In float32, within what the error bound says of tanh, and of the roundings of a product."""
    cap = found(size, factor)
    end = LIMIT / abs(factor)
    s = np.linspace(-end, end, 100_001).astype(np.float32)
    text = re.sub(r"([\d.e+-]+\d)f", r"np.float32(\1)", at_row(cap.product))
    wrong = eval(text, {"s": s, "np": np}) - size * np.tanh(s.astype(np.float64) * factor)
    assert np.abs(wrong).max() < abs(size) * 2.0**-21


def test_beyond_it_keeps_growing_and_leaves_tanh() -> None:
    """So a score that is too large has a probability that says so, and others have smaller ones."""
    x = np.linspace(0, 100, 1_000_001)
    values = grown(x)
    assert (np.diff(values) > 0).all()
    beyond = x >= LIMIT
    apart = (values - np.tanh(x))[beyond]
    assert apart[0] > 0
    assert (np.diff(apart) > 0).all()


@pytest.mark.parametrize("size", [20.0, 30.0, 50.0, 400.0])
def test_what_is_lost_of_scores_far_below(size: float) -> None:
    cap = found(size, 0.01, 1 / np.log(2))
    x = np.linspace(LIMIT, 8, 100_001)
    tanh = np.tanh(x)
    lost = -np.expm1(-size * (grown(x) - tanh)) * np.exp(-size * tanh)
    assert lost.max() <= 2.0**cap.far <= max(1.2 * lost.max(), 2.0**-80)
    assert 2.0**cap.least_sum == pytest.approx(2.0**cap.far / TAIL)


def test_what_the_largest_score_is_told_by() -> None:
    """A score beyond the limit is larger than `most`, by more than roundings of exponents can hide."""
    cap = found(43.3, 0.0029)
    assert 0 < cap.size * polynomial(LIMIT) - cap.most < 2.0**-9


@pytest.mark.parametrize(
    "score",
    [
        S,
        capped(43.3, 0.003, Binary("+", S, Index("kv_idx"))),
        capped(43.3, 1e-30),
        capped(5.0, 0.003),  # of ordinary rows it could never be told
        Binary("+", capped(43.3, 0.003), Index("kv_idx")),
        Binary("+", capped(43.3, 0.003), capped(43.3, 0.004)),
    ],
)
def test_other_scores_stay(score: Expr) -> None:
    assert cap_of(score, None) is None


@pytest.mark.parametrize(
    ("score", "softmax", "tail"),
    [
        ("softcap(dot(q, k) / 8, 30)", "online(maximum = lazy(20))", TAIL),
        ("softcap(dot(q, k) / 8, 30)", "online", 0.0),  # looks at each tile's maximum anyway
        ("softcap(dot(q, k) / 8, 5)", "online(maximum = lazy(20))", 0.0),
        ("dot(q, k) / 8", "online(maximum = lazy(20))", 0.0),
    ],
)
def test_the_bound_says_what_is_lost(score: str, softmax: str, tail: float) -> None:
    text = SPEC.format(score=score, softmax=softmax)
    (module,) = plan_program(resolve(parse(Source("a.attn", text)), prelude())).modules
    assert module.kernel.bound.tail == tail
    assert layout_of(module.kernel).capped == bool(tail)


@pytest.mark.parametrize(
    ("score", "softmax", "width", "keys"),
    [
        ("softcap(dot(q, k) / sqrt(D), 50)", "online(maximum = lazy(20))", 256, 64),
        ("softcap(dot(q, k) / sqrt(D), 50)", "online(maximum = lazy(20))", 192, 96),
        ("softcap(dot(q, k) / sqrt(D), 50)", "online", 256, 80),  # by tanh
        ("cap * tanh(dot(q, k) * inner)", "online(maximum = lazy(20))", 256, 80),
        ("dot(q, k) / sqrt(D)", "online(maximum = lazy(20))", 256, 80),
    ],
)
def test_wide_heads_leave_a_polynomial_the_registers_of_fewer_keys(
    score: str, softmax: str, width: int, keys: int
) -> None:
    text = SPEC.format(score=score, softmax=softmax).replace(", 64]", f", {width}]")
    if "cap *" in score:
        text = text.replace("  score", "  input cap, inner: f32[]\n  score")
    (module,) = plan_program(resolve(parse(Source("a.attn", text)), prelude())).modules
    assert [config.tile_kv for config in module.kernel.configs] == [keys]


@pytest.mark.parametrize("factor", [*_FACTORS, -_FACTORS[0], -_FACTORS[1]])
def test_factors_between_two_are_taken(factor: float) -> None:
    assert cap_of(capped(50.0, factor), None) is not None
    assert cap_of(capped(50.0, factor * 2.0), None) is None or abs(factor) == _FACTORS[0]
    assert cap_of(capped(50.0, factor * 0.5), None) is None or abs(factor) == _FACTORS[1]
    assert cap_of(capped(0.0, factor), None) is None
