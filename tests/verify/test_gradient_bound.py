"""The bound of gradients says something of rows whose scores are large, and counts where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnc.model.attention import Attention
from attnc.plan.ir.backward import GradientBound
from attnc.reference import Floats, reference
from attnc.verify.case import Case
from attnc.verify.gradient_bound import (
    ExpectedGradient,
    cotangents_of,
    expect_gradients,
    judge_gradients,
)
from attnc.verify.problem import build
from tests.verify.judging import assert_within_bound, modules_of, spec, subject_of_text
from tests.verify.test_tolerance import chain

DIMS = {"B": 1, "M": 21, "N": 37, "H": 1}


def planned(score: str, dtype: str = "f32", mask: str = "causal") -> tuple[Attention, GradientBound]:
    lines = (
        f"input q: {dtype}[B, M, H, 16]", f"input k, v: {dtype}[B, N, H, 16]", f"score = {score}",
        f"mask = {mask}", "normalize = softmax", f"output o: {dtype}[B, M, H, 16]", "grad q, k, v",
    )  # fmt: skip
    (module,) = modules_of(spec(lines, "tile.q = 16, tile.kv = 16"))
    assert module.backward is not None
    return module.variant.attention, module.backward.bound


def expected(score: str, dtype: str = "f32", logits: str = "random") -> Mapping[str, ExpectedGradient]:
    attention, bound = planned(score, dtype)
    inputs = build(attention, Case(dims=DIMS, seed=5, logits=logits)).inputs
    plain = {name: x.detach() if hasattr(x, "detach") else x for name, x in inputs.items()}
    cotangents = dict(cotangents_of(attention, reference(attention, plain), seed=5))
    return expect_gradients(attention, plain, cotangents, bound)


def values(of: Mapping[str, ExpectedGradient]) -> dict[str, Floats]:
    return {name: want.value.copy() for name, want in of.items()}


@pytest.mark.parametrize("score", ["dot(q, k) * sigmoid(dot(q, k))", "dot(q, k) / (1 + exp(-dot(q, k)))"])
def test_gradients_where_exp_overflows_are_checked(score: str) -> None:
    """Scores of -6e4: the slope is 0, and v's gradient that of a mean."""
    wanted = expected(score, logits="very_negative")
    right = judge_gradients(wanted, values(wanted))
    assert (right.ok, right.open) == (True, 0)
    assert not wanted["q"].value.any()
    wrong = judge_gradients(wanted, {**values(wanted), "q": wanted["q"].value + np.nan})
    assert not wrong.ok


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_keys_that_vanish_beside_a_large_score_are_checked(dtype: str) -> None:
    """Their scores are wrong by more than 709, and their probabilities are 0 all the same."""
    wanted = expected("dot(q, k) - 1e9 * (q_pos - kv_idx)", dtype)
    right = judge_gradients(wanted, values(wanted))
    assert (right.ok, right.open) == (True, 0)
    for name in "qkv":
        wrong = judge_gradients(wanted, {**values(wanted), name: wanted[name].value + 0.5})
        assert not wrong.ok
        assert wrong.where.startswith(f"d{name}[")


def test_elements_without_a_bound_are_counted() -> None:
    """Which of the largest keys a row sees is open, and with it dq; keys that no row is near have a bound."""
    wanted = expected("dot(q, k) * 1e7")
    bounded = {name: np.isfinite(want.allowed).all(axis=(0, 2, 3)) for name, want in wanted.items()}
    assert not bounded["q"].any()
    assert 0 < bounded["k"].sum() < bounded["k"].size
    assert (bounded["k"] == bounded["v"]).all()
    found = values(wanted)
    found["k"][:, ~bounded["k"]] = np.nan
    result = judge_gradients(wanted, found)
    assert result.ok
    assert result.open == sum(int(np.isinf(want.allowed).sum()) for want in wanted.values())
    found["v"][:, np.flatnonzero(bounded["v"])[0]] = 1e-20
    assert not judge_gradients(wanted, found).ok


def test_one_sum_over_many_rows() -> None:
    """dv of a key that all rows see: one chain of tensor core sums cuts off more than the rounding of P."""
    attention, bound = planned("dot(q, k)", "f16", "true")
    rows = 1 << 17
    inputs = {name: np.zeros((1, n, 1, 16)) for name, n in (("q", rows), ("k", 1), ("v", 1))}
    do = np.full((1, rows, 1, 16), 2.0**-6 + 3 * 2.0**-16)
    found = {"v": np.full((1, 1, 1, 16), chain(do[0, :, 0, 0], at_once=2))}
    verdicts = []
    for chained in (True, False):
        changed = replace(bound, tile=128, min_tile=128, forward=replace(bound.forward, chained=chained))
        wanted = expect_gradients(attention, inputs, {"o": do}, changed)
        verdicts.append(judge_gradients({"v": wanted["v"]}, found))
    assert [(verdict.ok, verdict.open) for verdict in verdicts] == [(True, 0), (False, 0)]


def test_a_do_that_repeats_adds_equal_errors_up() -> None:
    """All rows have o = 1 + 2^-8, which bf16 rounds to 1: delta is 1/16 off in each, and in none of them the
    other way.
    """
    attention, bound = planned("dot(q, k)", "bf16", "true")
    inputs = {"q": np.ones((1, 256, 1, 16)), "k": np.zeros((1, 2, 1, 16)), "v": np.ones((1, 2, 1, 16))}
    inputs["v"][:, 1] += 2.0**-7
    wanted = expect_gradients(attention, inputs, {"o": np.ones((1, 256, 1, 16))}, bound)
    assert wanted["k"].value[0, :, 0, 0].tolist() == [-8, 8]
    found = {"k": np.zeros((1, 2, 1, 16))}
    found["k"][:, 1] = 16
    assert judge_gradients({"k": wanted["k"]}, found).ok
    found["k"][:, 1] = 64
    assert not judge_gradients({"k": wanted["k"]}, found).ok


def expected_of_sink(score: str, sink: float, values: str = "random") -> ExpectedGradient:
    """The gradient of a sink, which is this number, in f32."""
    lines = (
        "input q: f32[B, M, H, 16]",
        "input k, v: f32[B, N, H, 16]",
        "input sink: f32[H]",
        f"score = {score}",
        "mask = causal",
        "normalize = softmax(sink = sink[h])",
        "output o: f32[B, M, H, 16]",
        "grad q, k, v, sink",
    )
    (module,) = modules_of(spec(lines, "tile.q = 16, tile.kv = 16"))
    assert module.backward is not None
    attention = module.variant.attention
    inputs = build(attention, Case(dims=DIMS, seed=5, values=values)).inputs
    plain = {name: x.detach() if hasattr(x, "detach") else x for name, x in inputs.items()}
    plain["sink"] = torch.full((1,), sink)
    cotangents = dict(cotangents_of(attention, reference(attention, plain), seed=5))
    return expect_gradients(attention, plain, cotangents, module.backward.bound)["sink"]


def test_nothing_is_said_of_a_sink_beside_scores_that_overflow() -> None:
    score = "log(1 + exp(100 * tanh(dot(q, k))))"  # in single precision, and in no wider type
    assert np.isinf(expected_of_sink(score, 0.0).allowed).all()
    assert np.isfinite(expected_of_sink(score.replace("100", "80"), 0.0).allowed).all()


def test_weights_of_a_sink_below_normal_numbers_may_be_0() -> None:
    """In single precision they are flushed, and values of some hundreds make large deltas of them."""
    want = expected_of_sink("20 * tanh(9 * dot(q, k))", -68.0, "cancelling")
    assert 1e-37 < np.abs(want.value).max() < want.allowed.max()


def test_values_below_the_normal_numbers_may_be_taken_for_0_under_steep_weights() -> None:
    """Squares of scores of some hundreds have slopes as large."""
    lines = (
        *("input q: bf16[B, H, M, 64]", "input k, v: bf16[B, H, N, 64]", "score = dot(q, k)"),
        *("weight = max(score, 0) * max(score, 0)", "normalize = none"),
        *("output o: bf16[B, H, M, 64]", "grad q, k, v"),
    )
    made = subject_of_text(spec(lines, "loops = [q, kv], tile.q = 32, tile.kv = 32"))
    case = Case(dims={"B": 1, "H": 1, "M": 13, "N": 40}, logits="spike", values="denormal")
    assert_within_bound(made, case)
