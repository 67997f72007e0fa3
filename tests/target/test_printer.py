"""Printed expressions keep their meaning, with the fewest parentheses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.expr.construct import conj, disj
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import (
    Binary,
    BinaryOp,
    Call,
    Compare,
    CompareOp,
    Const,
    Expr,
    Index,
    Neg,
    Not,
    Ref,
    uses,
)
from attnc.runtime.cubin import disassemble
from attnc.runtime.nvrtc import compile_cubin
from attnc.target.sm80.printer import scalar as in_cuda
from attnc.target.support import with_headers
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
    """What simplification leaves: a comparison of constants it decides."""
    compared = st.builds(Compare, st.sampled_from(COMPARISONS), integers(), integers())
    return st.recursive(
        compared.filter(uses),
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


X, WORD = Ref("x", "float"), Ref("word", "int")


@pytest.mark.parametrize(
    ("expr", "triton", "cuda"),
    [
        (Call("sqrt", (Call("abs", (WORD,)),)), "tl.sqrt(tl.abs(word.to(tl.float32)))", "sqrtf(fabsf(word))"),
        (Binary("*", X, Call("abs", (WORD,))), "x * tl.abs(word.to(tl.float32))", "x * fabsf(word)"),
        (
            Binary("/", Call("abs", (WORD,)), Const(3)),
            "tl.abs(word.to(tl.float32)) / 3",
            "fabsf(word) / 3",
        ),
        (Call("sqrt", (Call("abs", (Index("b"),)),)), "tl.sqrt(tl.abs(b).to(tl.float32))", "sqrtf(abs(b))"),
    ],
)
def test_the_absolute_value_of_the_least_integer_is_taken_of_a_float(
    expr: Expr, triton: str, cuda: str
) -> None:
    """Compilers hold that of an integer of 32 bits to be none that is negative, and convert it as such."""
    assert scalar(expr) == triton
    assert in_cuda(expr) == cuda


@pytest.mark.parametrize(
    "known", [Call("exp2", (X,)), Call("abs", (X,)), Binary("+", Call("abs", (X,)), Const(1.0))]
)
def test_a_minimum_that_is_known_but_for_nan_is_nan_in_machine_code(known: Expr) -> None:
    """By a comparison with 0, ptxas makes 0 of it."""
    shown = in_cuda(Call("min", (known, Const(0.0))))
    head = 'extern "C" __global__ void f(float* to) { const float x = to[threadIdx.x]; to[threadIdx.x] = '
    source = with_headers(f'#include "device.cuh"\n{head}{shown}; }}\n')
    code = disassemble(compile_cubin(source, ["-arch=sm_90a", "-DELEMENT=float"]).image)
    assert code is not None
    assert "FSETP.NAN" in code


def test_other_minima_are_comparisons() -> None:
    assert in_cuda(Call("min", (X, Const(0.0)))) == "min_(x, 0.0f)"
    assert in_cuda(Call("min", (Neg(Call("abs", (X,))), Const(0.0)))) == "min_(-fabsf(x), 0.0f)"
    assert in_cuda(Call("min", (Call("abs", (X,)), Const(1.0)))) == "min_(fabsf(x), 1.0f)"
