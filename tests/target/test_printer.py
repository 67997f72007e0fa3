"""Printed expressions keep their meaning, with the fewest parentheses."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnc.expr.construct import conj, disj
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Binary, BinaryOp, Compare, CompareOp, Const, Expr, Index, Not
from attnc.target.triton.printer import scalar

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
