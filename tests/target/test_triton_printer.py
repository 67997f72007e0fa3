"""Printed expressions mean what the tree means, with no parenthesis to spare."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.expr.construct import conj, disj, in_float32
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Binary, BinaryOp, Call, Compare, CompareOp, Const, Dot, Expr, Index, Not
from attnc.target.sm80.printer import scalar as cuda_scalar
from attnc.target.triton.printer import scalar, tiled
from tests.expr.spell import spell

TEXTS = {
    "q_pos - 4 <= kv_idx": "q_pos[:, None] - 4 <= kv_idx[None, :]",
    "kv_idx <= q_pos and kv_idx >= q_pos - 4": "(kv_idx[None, :] <= q_pos[:, None])"
    " & (kv_idx[None, :] >= q_pos[:, None] - 4)",
    "not kv_idx < 3": "~(kv_idx[None, :] < 3)",
    "kv_idx // 8 == q_idx // 8": "kv_idx[None, :] // 8 == q_idx[:, None] // 8",
    "q_pos // 8 == 0": "_floor_div(q_pos[:, None], 8) == 0",
    "(q_pos - kv_idx) % 2 == 0": "_floor_mod(q_pos[:, None] - kv_idx[None, :], 2) == 0",
    "abs(q_idx - kv_idx) < 3": "tl.abs(q_idx[:, None] - kv_idx[None, :]) < 3",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_tile_expression_broadcasts_its_vectors(text: str) -> None:
    assert tiled(spell(text)) == TEXTS[text]


#: A constant, as CUDA and Triton print it.
CONSTANTS = {
    0.1: ("0.1f", "0.1"),
    -1e30: ("-1e+30f", "-1e+30"),
    2.0**-126: ("1.1754943508222875e-38f", "1.1754943508222875e-38"),
    2.0**-140: ("7.174648137343064e-43f", "tl.full([], 7.174648137343064e-43, tl.float32)"),
    1.1 * 2.0**-149: ("1.401298464324817e-45f", "tl.full([], 1.401298464324817e-45, tl.float32)"),
    1e-60: ("0.0f", "0.0"),
    -1e-60: ("-0.0f", "-0.0"),
    3.4028234663852886e38: ("3.4028234663852886e+38f", "3.4028234663852886e+38"),
    3.5e38: ("INF", 'float("inf")'),
    -1e300: ("-INF", '-float("inf")'),
}


@pytest.mark.parametrize("value", CONSTANTS)
def test_constants_are_those_of_float32(value: float) -> None:
    assert (cuda_scalar(Const(value)), scalar(Const(value))) == CONSTANTS[value]
    with np.errstate(over="ignore"):
        nearest = float(np.float32(value))
    normal = 2.0**-126 <= abs(value) <= 3.4028234663852886e38
    assert in_float32(value) == (value if normal else nearest)


@pytest.mark.parametrize("value", [1, 0.5, -0.5])
def test_a_constant_is_no_addend_of_a_product_of_triton(value: float) -> None:
    """As an addend it would be what the product begins with, and then be taken for the product."""
    shown = {"1": "s - -1", "0.5": "s - -0.5", "-0.5": "s - 0.5"}[str(value)]
    assert tiled(Binary("+", Const(value), Dot())) == tiled(Binary("+", Dot(), Const(value))) == shown
    least = Call("max", (Dot(), Const(-inf)))
    assert tiled(Binary("+", least, Const(value))) == tiled(least) + shown.removeprefix("s")
    assert tiled(Binary("*", Const(2.0), Binary("+", Dot(), Const(value)))) == f"2.0 * ({shown})"
    assert cuda_scalar(Binary("+", Dot(), Const(0.5))) == "s + 0.5f"


INDICES = ("q_idx", "kv_idx", "b")
OPERATORS: tuple[BinaryOp, ...] = ("+", "-", "*")
COMPARISONS: tuple[CompareOp, ...] = ("==", "!=", "<", "<=", ">", ">=")


def integers() -> st.SearchStrategy[Expr]:
    leaves = st.one_of(st.sampled_from([Index(name) for name in INDICES]), st.integers(-5, 5).map(Const))
    return st.recursive(
        leaves,
        lambda inner: st.builds(Binary, st.sampled_from(OPERATORS), inner, inner),
        max_leaves=6,
    )


def conditions() -> st.SearchStrategy[Expr]:
    return st.recursive(
        st.builds(Compare, st.sampled_from(COMPARISONS), integers(), integers()),
        lambda inner: st.one_of(inner.map(Not), st.builds(conj, inner, inner), st.builds(disj, inner, inner)),
        max_leaves=5,
    )


@given(conditions(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))
def test_printed_conditions_keep_their_meaning(expr: Expr, q: int, kv: int, b: int) -> None:
    values = {"q_idx": np.int64(q), "kv_idx": np.int64(kv), "b": np.int64(b)}
    want = bool(evaluate(expr, Env(indices={name: int(value) for name, value in values.items()})))
    arrays = {name: np.asarray([value]) for name, value in values.items()}
    text = scalar(expr).replace(".to(tl.int64)", "")
    got = eval(text, {}, {**arrays, "True": np.True_, "False": np.False_})
    assert bool(np.all(got)) == want


WIDE = {
    "kv_idx * 100000000 <= q_idx * 3": "kv_idx.to(tl.int64) * 100000000 <= q_idx.to(tl.int64) * 3",
    "q_idx * kv_idx < 100": "q_idx.to(tl.int64) * kv_idx < 100",
    "(q_idx + kv_idx) * 1000 < 5": "(q_idx + kv_idx).to(tl.int64) * 1000 < 5",
    "kv_idx // 256 * 256 <= q_idx": "kv_idx // 256 * 256 <= q_idx",
    "kv_idx + 2000000000 < 5": "kv_idx.to(tl.int64) + 2000000000 < 5",
    "3000000000 - kv_idx < 5": "3000000000 - kv_idx.to(tl.int64) < 5",
    "kv_idx < 3000000000": "kv_idx.to(tl.int64) < 3000000000",
    "kv_idx % 3000000000 < 5": "kv_idx.to(tl.int64) % 3000000000 < 5",
    "min(q_pos, 3000000000) < 5": "tl.minimum(q_pos.to(tl.int64), 3000000000) < 5",
    "kv_lo < 3000000000": "tl.cast(kv_lo, tl.int64) < 3000000000",
}


@pytest.mark.parametrize("text", WIDE)
def test_what_may_leave_32_bits_is_computed_in_64(text: str) -> None:
    assert scalar(spell(text)) == WIDE[text]
