"""Derivatives of scores: how they read, and central differences in float64."""

from dataclasses import replace

import numpy as np
import pytest

from attnc.expr.derive import derive
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Expr, show
from tests.expr.spell import spell

M_, N_ = 4, 6


@pytest.mark.parametrize(
    ("score", "d_dot", "d_loads"),
    [
        ("dot(q, k)", "1.0", {}),
        ("dot(q, k) / sqrt(64)", "0.125", {}),
        ("dot(q, k) * 0.5 + bias[h, q_idx, kv_idx]", "0.5", {"bias[h, q_idx, kv_idx]": "1.0"}),
        (
            "dot(q, k) / 8 - slope[h] * abs(q_pos - kv_idx)",
            "0.125",
            {"slope[h]": "-1.0 * abs(q_pos - kv_idx)"},
        ),
        (
            "50 * tanh(dot(q, k) / 50)",
            "1.0 - tanh(dot(q, k) / 50) * tanh(dot(q, k) / 50)",
            {},
        ),
        ("where(kv_idx < 2, dot(q, k), 0.0)", "where(kv_idx < 2, 1.0, 0.0)", {}),
        ("bias[h, 0, 0] * 1.0", "0.0", {"bias[h, 0, 0]": "1.0"}),
        ("sigmoid(dot(q, k))", "sigmoid(dot(q, k)) * (1.0 - sigmoid(dot(q, k)))", {}),
        ("where(kv_idx < 2, dot(q, k), -inf)", "where(kv_idx < 2, 1.0, 0.0)", {}),
    ],
)
def test_derivatives_read_well(score: str, d_dot: str, d_loads: dict[str, str]) -> None:
    derivative = derive(spell(score))
    assert show(derivative.dot) == d_dot
    assert {show(load): show(value) for load, value in derivative.loads} == d_loads


SCORES = (
    "30 * tanh(dot(q, k) / sqrt(D) / 30) - slope[h] * abs(q_pos - kv_idx) + bias[h, q_idx, kv_idx]",
    "dot(q, k) * dot(q, k) / (2 + exp(dot(q, k))) - dot(q, k)",
    "where(q_idx < kv_idx, dot(q, k) * slope[h], sqrt(1 + dot(q, k) * dot(q, k)))",
    "max(dot(q, k), slope[h]) + min(dot(q, k) / 2, bias[h, q_idx, kv_idx]) * 3",
    "-log(3 + tanh(dot(q, k))) / (slope[h] + 4) + abs(dot(q, k))",
    "(dot(q, k) - bias[h, q_idx, kv_idx]) * (bias[h, q_idx, kv_idx] + bias[h, 0, kv_idx])",
    "dot(q, k) * sigmoid(dot(q, k) * slope[h]) + exp2(dot(q, k) - slope[h]) * 0.1",
    "log2(3 + dot(q, k) * dot(q, k)) - erf(dot(q, k) * slope[h]) * 2",
    "sin(dot(q, k) * slope[h]) - cos(slope[h] / 2) * cos(dot(q, k))",
    "dot(q, k) / (1 + exp(-bias[h, q_idx, kv_idx])) + min(max(dot(q, k), -0.5), slope[h])",
    "dot(q, k) % 1.7 + (bias[h, q_idx, kv_idx] % slope[h]) + dot(q, k) // 2 * slope[h]",
)


def environment() -> Env:
    rng = np.random.default_rng(7)
    return Env(
        indices={"b": 0, "h": 1, "q_idx": np.arange(M_)[:, None], "kv_idx": np.arange(N_)},
        dims={"B": 1, "H": 2, "M": M_, "N": N_, "D": 64},
        tensors={"slope": np.array([0.3, 0.8]), "bias": rng.standard_normal((2, M_, N_))},
        dot=rng.standard_normal((M_, N_)),
    )


def total(score: Expr, env: Env) -> float:
    return float(np.broadcast_to(evaluate(score, env), (M_, N_)).sum())


@pytest.mark.parametrize("text", SCORES)
def test_d_dot_matches_central_differences(text: str) -> None:
    score, env, step = spell(text), environment(), 1e-6
    assert env.dot is not None
    high, low = (evaluate(score, replace(env, dot=env.dot + sign * step)) for sign in (1, -1))
    np.testing.assert_allclose(evaluate(derive(score).dot, env), (high - low) / (2 * step), atol=1e-8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("text", SCORES)
@pytest.mark.parametrize("tensor", ["slope", "bias"])
def test_gradients_of_tensors_match_central_differences(text: str, tensor: str) -> None:
    score, env, step = spell(text), environment(), 1e-6
    gradient = np.zeros_like(env.tensors[tensor])
    for load, value in derive(score).loads:
        if load.tensor == tensor:
            at = tuple(np.broadcast_to(evaluate(index, env), (M_, N_)) for index in load.indices)
            np.add.at(gradient, at, np.broadcast_to(evaluate(value, env), (M_, N_)))

    def moved(position: tuple[int, ...], by: float) -> float:
        values = env.tensors[tensor].copy()
        values[position] += by
        return total(score, replace(env, tensors={**env.tensors, tensor: values}))

    for position in np.ndindex(gradient.shape):
        difference = (moved(position, step) - moved(position, -step)) / (2 * step)
        assert gradient[position] == pytest.approx(difference, abs=1e-7)


@pytest.mark.parametrize("text", ["dot(q, k) * sigmoid(dot(q, k))", "dot(q, k) / (1 + exp(-dot(q, k)))"])
def test_slopes_are_finite_where_exp_overflows(text: str) -> None:
    env = Env(dot=np.array([-1e4, -800.0, 0.0, 800.0, 1e4]))
    np.testing.assert_array_equal(evaluate(derive(spell(text)).dot, env), [0, 0, 0.5, 1, 1])
