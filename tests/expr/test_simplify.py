"""Folding, substitution, negation normal form and scaling, read through `show`."""

import numpy as np
import pytest

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import FALSE, TRUE, Const, Dim, Expr, Index, Load, Param, show
from attnc.expr.simplify import nnf, scale_by, simplify, substitute
from tests.expr.spell import spell


@pytest.mark.parametrize(
    ("text", "simple"),
    [
        ("kv_idx + 0", "kv_idx"),
        ("0 + kv_idx", "kv_idx"),
        ("kv_idx + 1 + 2 - 3", "kv_idx"),
        ("kv_idx - 5 + 2", "kv_idx - 3"),
        ("kv_idx - -5", "kv_idx + 5"),
        ("1 * kv_idx // 1", "kv_idx"),
        ("kv_idx * 2 * 3", "kv_idx * 6"),
        ("kv_idx % 1", "0"),
        ("7 // 2 + -7 // 2 + -7 % 4", "0"),
        ("kv_idx // 0", "kv_idx // 0"),
        ("-(q_idx - kv_idx)", "kv_idx - q_idx"),
        ("sqrt(16) / 8", "0.5"),
        ("log(-1)", "log(-1)"),
        ("min(3, 4) + max(3, 4) + abs(-2)", "9"),
        ("max(0.5, min(1.5, 3))", "1.5"),
        ("max(0.5, 3)", "3.0"),
        ("where(1 < 2, q_idx, kv_idx)", "q_idx"),
        ("where(q_idx < 2, kv_idx, kv_idx)", "kv_idx"),
        ("where(q_idx < 2, keep[b, kv_idx], true)", "q_idx < 2 and keep[b, kv_idx] or q_idx >= 2"),
        ("true and not false and (q_idx < 1 or 2 > 1)", "true"),
        ("q_idx < 1 and q_idx < 1 and kv_idx <= kv_idx", "q_idx < 1"),
        ("q_idx == 1 or not (q_idx < 2 or false)", "q_idx == 1 or q_idx >= 2"),
        ("dot(q, k) / 8 / 50", "dot(q, k) / 400"),
        ("dot(q, k) * 8 / 2.0", "dot(q, k) * 4.0"),
        ("q_idx * 1.0", "q_idx * 1.0"),
        ("slope[h] + 0", "slope[h]"),
        ("sigmoid(0) + exp2(3) + log2(8) + erf(0) + sigmoid(inf) + exp(-inf)", "12.5"),
        ("dot(q, k) / (1 + exp(-dot(q, k)))", "dot(q, k) * sigmoid(dot(q, k))"),
        ("1 / (exp(slope[h]) + 1)", "sigmoid(-slope[h])"),
        ("dot(q, k) / (2 + exp(-dot(q, k)))", "dot(q, k) / (2 + exp(-dot(q, k)))"),
        ("inf * -2 + 1", "-inf"),
        ("inf - inf", "inf - inf"),
        ("0 * inf", "0 * inf"),
        ("slope[h] * 0.0 * inf", "slope[h] * 0.0 * inf"),
        ("slope[h] / inf * inf", "slope[h] / inf * inf"),
        ("1e308 * 10", "1e+308 * 10"),
        ("kv_idx < inf and kv_idx >= -inf and q_idx != inf", "true"),
        ("slope[h] < inf", "slope[h] < inf"),
        ("keep[b, kv_idx] == true and (flag[b] != true)", "keep[b, kv_idx] and not flag[b]"),
        ("keep[b, kv_idx] == keep[b, kv_idx]", "true"),
        ("(q_idx < 2) == (kv_idx < 3)", "(q_idx < 2) == (kv_idx < 3)"),
    ],
)
def test_simplify(text: str, simple: str) -> None:
    assert show(simplify(spell(text))) == simple


def test_constants_of_different_types_differ() -> None:
    assert len({Const(True), Const(1), Const(1.0)}) == 3
    assert simplify(spell("1 == 1")) == TRUE != Const(1)


def test_an_int_never_becomes_a_float() -> None:
    assert simplify(spell("where(true, 1, 2.0)")).type == "float"
    assert simplify(spell("q_idx + 0.0")).type == "float"
    assert simplify(spell("q_idx / 1")).type == "float"


def test_what_is_simple_already_is_the_same_node() -> None:
    mask = simplify(spell("q_pos - 100 <= kv_idx and kv_idx <= q_pos and doc[b, q_idx] == doc[b, kv_idx]"))
    assert simplify(mask) is mask
    assert substitute(mask, {Param("W", "int"): Const(1)}) is mask
    assert substitute(mask, {Index("b"): Const(1)}) is not mask


def test_substitute_replaces_params_indices_and_dims_in_extents_too() -> None:
    tree = spell("kv_idx + doc[b, kv_idx]")
    made = substitute(tree, {Index("kv_idx"): Const(3), Index("b"): Const(0), Dim("N"): Const(9)})
    assert show(made) == "3 + doc[0, 3]"
    loads = [node for node in (made.right,) if isinstance(node, Load)]  # type: ignore[union-attr]  # a sum
    assert loads[0].extents == (Dim("B"), Const(9))
    assert substitute(Param("W", "int"), {Param("W", "int"): Const(4)}) == Const(4)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("not (q_idx < 1 and not kv_idx == 2)", "q_idx >= 1 or kv_idx == 2"),
        ("not (keep[b, kv_idx] or flag[b])", "not keep[b, kv_idx] and not flag[b]"),
        ("(q_idx < 1) == (kv_idx < 1)", "q_idx < 1 and kv_idx < 1 or q_idx >= 1 and kv_idx >= 1"),
        ("not slope[h] < 1", "not slope[h] < 1"),  # NaN is neither below 1 nor above
        ("not (slope[h] == 1 or not slope[h] > 2)", "slope[h] != 1 and slope[h] > 2"),
        ("(q_idx < 1) != flag[b]", "(q_idx >= 1 or not flag[b]) and (q_idx < 1 or flag[b])"),
        (
            "not where(flag[b], q_idx < 1, kv_idx < 1)",
            "(not flag[b] or q_idx >= 1) and (flag[b] or kv_idx >= 1)",
        ),
    ],
)
def test_nnf(text: str, normal: str) -> None:
    assert show(nnf(spell(text))) == normal


@pytest.mark.parametrize(
    ("text", "scaled"),
    [
        ("dot(q, k)", "dot(q, k) * 2.0"),
        ("dot(q, k) / sqrt(16)", "dot(q, k) * 0.5"),
        ("50 * tanh(dot(q, k) / 8 / 50)", "100.0 * tanh(dot(q, k) * 0.0025)"),
        (
            "dot(q, k) / 4 - slope[h] * abs(q_idx - kv_idx)",
            "dot(q, k) * 0.5 - slope[h] * 2.0 * abs(q_idx - kv_idx)",
        ),
        ("dot(q, k) + bias[h, q_idx, kv_idx]", "(dot(q, k) + bias[h, q_idx, kv_idx]) * 2.0"),
        ("dot(q, k) / sqrt(D)", "dot(q, k) * (2.0 / sqrt(D))"),
        ("-(dot(q, k) * 3.0)", "-(dot(q, k) * 6.0)"),
        ("where(q_idx < 1, dot(q, k), -1)", "where(q_idx < 1, dot(q, k) * 2.0, -2.0)"),
        ("3 * kv_idx", "6.0 * kv_idx"),
        # Differences of positions stay integers: multiples of them are rounded in float32, and may cancel.
        ("slope[h] * (2 * q_pos - 2 * kv_idx)", "slope[h] * 2.0 * (2 * q_pos - 2 * kv_idx)"),
        ("(2 * q_pos - 2 * kv_idx) * 0.25", "(2 * q_pos - 2 * kv_idx) * 0.5"),
        ("dot(q, k) / 4 - (8 - 2 * kv_idx)", "dot(q, k) * 0.5 - (8 - 2 * kv_idx) * 2.0"),
        (
            "where(flag[b], 2 * q_pos - 2 * kv_idx, 3) + 0.5",
            "where(flag[b], 2 * q_pos - 2 * kv_idx, 3) * 2.0 + 1.0",
        ),
    ],
)
def test_scale_by(text: str, scaled: str) -> None:
    assert show(scale_by(spell(text), 2.0)) == scaled


def test_scaling_is_multiplication() -> None:
    rng = np.random.default_rng(0)
    q = np.arange(5)[:, None]
    kv = np.arange(7)
    env = Env(
        indices={"h": 1, "q_idx": q, "kv_idx": kv},
        dims={"H": 2, "M": 5, "N": 7, "D": 64},
        tensors={"slope": rng.random(2), "bias": rng.standard_normal((2, 5, 7))},
        dot=rng.standard_normal((5, 7)),
    )
    for text in (
        "30 * tanh(dot(q, k) / sqrt(D) / 30) - slope[h] * abs(q_idx - kv_idx) + bias[h, q_idx, kv_idx]",
        "where(q_idx < 2, dot(q, k) * 3, exp(dot(q, k)) / 7) / (1 + q_idx)",
    ):
        score = spell(text)
        np.testing.assert_allclose(
            evaluate(scale_by(score, 1.7), env), 1.7 * evaluate(score, env), rtol=1e-13
        )


def constant_folds() -> list[Expr]:
    return [
        spell(f"{a} {op} {b}") for a in (-7, 7) for b in (-3, 3) for op in ("//", "%", "+", "-", "*", "/")
    ]


def test_folding_agrees_with_evaluate() -> None:
    for expr in constant_folds():
        folded = simplify(expr)
        assert isinstance(folded, Const)
        assert folded.value == evaluate(expr, Env())
    assert simplify(spell("1 < 0")) == FALSE
