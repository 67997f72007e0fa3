"""The reference's gradients against finite differences of the reference itself, and where they must
vanish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attnc.expr.nodes import Attended, Binary, Call, Compare, Const, Dim, Expr, Index, Load
from attnc.model.attention import Attention, Softmax
from attnc.model.dtypes import DType
from attnc.model.resolve import resolve
from attnc.model.tensors import Tensor
from attnc.model.variants import variants
from attnc.reference import reference
from attnc.reference_gradients import gradients
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from tests.specimens import CAUSAL, HEADS, SCALED, attention
from tests.test_reference import data

H, Q_POS, KV_IDX = Index("h"), Index("q_pos"), Index("kv_idx")
SLOPE = Load("slope", (H,), (HEADS,), "float")
PAIR = Load("pair", (Binary("-", Q_POS, KV_IDX),), (Const(4),), "float")
EXTRAS = (
    Tensor(name="slope", dtype=DType.F32, shape=(HEADS,)),
    Tensor(name="pair", dtype=DType.F32, shape=(Const(4),)),
    Tensor(name="least", dtype=DType.I32, shape=(Const(4),)),
)
ALIBI = Binary("-", SCALED, Binary("*", SLOPE, Call("abs", (Binary("-", Q_POS, KV_IDX),))))
CAPPED = Binary("*", Const(2.0), Call("tanh", (Binary("/", Binary("+", SCALED, PAIR), Const(2.0)),)))
#: Numbers of 32 bits, from which something is subtracted: what wraps would be greater.
LEAST = Load("least", (KV_IDX,), (Const(4),), "int")
BELOW = Call(
    "where",
    (Compare(">", Binary("-", LEAST, Const(33)), Q_POS), Binary("*", SLOPE, SCALED), SCALED),
)
SINK = Softmax(sink=Binary("*", SLOPE, Const(2.0)))


def specimen(score: Expr, mask: Expr, softmax: Softmax) -> tuple[Attention, dict[str, Any]]:
    tensors = data(m=5, n=4)
    make = torch.Generator().manual_seed(1)
    tensors["slope"] = torch.rand(6, generator=make, dtype=torch.float64)
    tensors["pair"] = torch.randn(4, generator=make, dtype=torch.float64)
    tensors["least"] = torch.full((4,), -(2**31), dtype=torch.int32)
    wanted = replace(attention(score, mask, softmax, EXTRAS), grads=("q", "k", "v", "slope", "pair"))
    return wanted, tensors


def loss(wanted: Attention, tensors: Mapping[str, Any], cotangents: Mapping[str, Any]) -> float:
    out = reference(wanted, tensors)
    lse = np.where(np.isneginf(out["lse"]), 0.0, out["lse"])
    return float((out["o"] * cotangents["o"]).sum() + (lse * cotangents["lse"]).sum())


#: Of rows and columns; slope is the score's too.
FINISHED = Binary(
    "+",
    Binary("*", Attended(), Binary("*", SLOPE, Attended())),
    Load("pair", (Index("d"),), (Const(4),), "float"),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("score", "softmax", "epilogue"),
    [
        (SCALED, Softmax(), None),
        (ALIBI, Softmax(), None),
        (CAPPED, Softmax(), None),
        (BELOW, Softmax(), None),
        (ALIBI, SINK, None),
        (ALIBI, SINK, FINISHED),
    ],
    ids=["scaled", "alibi", "capped", "below", "sink", "epilogue"],
)
def test_agree_with_finite_differences(score: Expr, softmax: Softmax, epilogue: Expr | None) -> None:
    wanted, tensors = specimen(score, CAUSAL, softmax)
    wanted = replace(wanted, epilogue=epilogue)
    rng = np.random.default_rng(0)
    out = reference(wanted, tensors)
    cotangents = {name: rng.standard_normal(value.shape) for name, value in out.items()}
    cotangents["lse"] = np.where(np.isneginf(out["lse"]), 0.0, cotangents["lse"])
    found = gradients(wanted, tensors, cotangents)
    for name in wanted.grads:
        direction = rng.standard_normal(tensors[name].shape)
        step = 1e-5 * torch.from_numpy(direction)
        ends = [loss(wanted, {**tensors, name: tensors[name] + s * step}, cotangents) for s in (1, -1)]
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(
            (found[name] * direction).sum(), rel=1e-6, abs=1e-8
        )


def test_values_that_are_columns_of_keys_add_their_gradient_to_that_of_the_keys() -> None:
    text = """attention a {
          input q: f32[B, M, Hkv * G, 6]
          input k: f32[B, N, Hkv, 6]
          input v: f32[B, N, Hkv, 4] via prefix(k)
          score = dot(q, k) / 3
          mask = causal
          normalize = softmax
          output o: f32[B, M, Hkv * G, 4]
          grad q, k
        }"""
    program = resolve(parse(Source("a.attn", text)), prelude())
    wanted = next(iter(variants(program, program.attention("a")))).attention
    make = torch.Generator().manual_seed(0)
    q, k, do = (
        torch.randn(shape, generator=make, dtype=torch.float64)
        for shape in ((1, 5, 4, 6), (1, 7, 2, 6), (1, 5, 4, 4))
    )
    q.requires_grad_()
    k.requires_grad_()
    keys = k.repeat_interleave(2, dim=2)
    scores = torch.einsum("bmhd,bnhd->bhmn", q, keys) / 3
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(3)
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    o = torch.einsum("bhmn,bnhd->bmhd", p, keys[..., :4])
    dq, dk = torch.autograd.grad(o, (q, k), do)
    found = gradients(wanted, {"q": q, "k": k}, {"o": do})
    np.testing.assert_allclose(found["q"], dq.numpy(), atol=1e-12)
    np.testing.assert_allclose(found["k"], dk.numpy(), atol=1e-12)


@pytest.mark.parametrize("prefix", [False, True], ids=["own values", "columns of keys"])
def test_a_page_gets_the_gradients_of_all_keys_that_it_holds(prefix: bool) -> None:
    """Of sequences that share pages, also with themselves; by PyTorch, through the gathered rows."""
    text = f"""attention a {{
          input q: f32[B, M, Hkv * G, 6]
          input k: f32[B, Hkv, N, 6] via paged(table, page = 3)
          input v: f32[B, Hkv, N, 4] via {"prefix(k)" if prefix else "paged(table, page = 3)"}
          input table: i32[B, P]
          input lens: i32[B]
          length N = lens[b]
          score = dot(q, k) / 3
          normalize = softmax
          output o: f32[B, M, Hkv * G, 4]
          grad q, k{"" if prefix else ", v"}
        }}"""
    program = resolve(parse(Source("a.attn", text)), prelude())
    wanted = next(iter(variants(program, program.attention("a")))).attention
    make = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(shape, generator=make, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 2, 4, 6), (6, 2, 3, 6), (6, 2, 3, 4), (3, 2, 4, 4))
    )
    table = torch.tensor([[4, 0, 2], [4, 4, -7], [1, 99, 99]], dtype=torch.int32)
    lens, made = torch.tensor([8, 4, 0]), []
    values = k[..., :4] if prefix else v
    for b in range(2):
        entries = table[b, : 3 - b].long()
        rows = [x[entries].movedim(1, 2).flatten(0, 1)[: lens[b]] for x in (k, values)]
        keys, own = (x.repeat_interleave(2, dim=1) for x in rows)
        p = (torch.einsum("mhd,nhd->hmn", q[b], keys) / 3).softmax(-1)
        made.append((torch.einsum("hmn,nhd->mhd", p, own) * do[b]).sum())
    leaves = (q, k) if prefix else (q, k, v)
    expected = torch.autograd.grad(torch.stack(made).sum(), leaves)
    tensors = {"q": q, "k": k, "table": table, "lens": lens} | ({} if prefix else {"v": v})
    found = gradients(wanted, {name: x.detach() for name, x in tensors.items()}, {"o": do.detach()})
    for name, value in zip(wanted.grads, expected, strict=True):
        np.testing.assert_allclose(found[name], value.numpy(), atol=1e-12)
    assert not found["k"][[1, 3, 5]].any()


def test_dropped_keys_get_no_gradient() -> None:
    p = Tensor(name="p", dtype=DType.F32, shape=())
    softmax = Softmax(dropout=Load("p", (), (), "float"), seed=Const(7))
    wanted = replace(attention(SCALED, CAUSAL, softmax, (p,)), grads=("q", "k", "v"))
    tensors = {**data(m=1, n=6, g=1), "p": 1.0}
    found = gradients(wanted, tensors, {"o": np.ones((2, 1, 2, 3))})
    assert all(not value.any() for value in found.values())


def test_what_nobody_sees_gets_no_gradient_even_if_it_is_not_a_number() -> None:
    mask = Compare("<", KV_IDX, Const(2))
    wanted = replace(attention(SCALED, mask), grads=("q", "k", "v"))
    tensors = data(m=3, n=4)
    clean = gradients(wanted, tensors, {"o": np.ones((2, 3, 6, 3))})
    tensors["k"][:, 2:] = torch.nan
    tensors["v"][:, 2:] = torch.inf
    for name, value in gradients(wanted, tensors, {"o": np.ones((2, 3, 6, 3))}).items():
        np.testing.assert_array_equal(value, clean[name])
        assert name == "q" or not value[:, 2:].any()


def test_rows_that_see_nothing_get_no_gradient() -> None:
    wanted = replace(attention(SCALED, CAUSAL), grads=("q", "k", "v"))
    found = gradients(wanted, data(m=5, n=2), {"o": np.ones((2, 5, 6, 3)), "lse": np.ones((2, 6, 5))})
    assert not found["q"][:, :3].any()
    assert found["q"][:, 3:].any()
    assert all(np.isfinite(value).all() for value in found.values())


def test_sizes_of_nothing() -> None:
    wanted = replace(attention(SCALED, CAUSAL), grads=("q", "k", "v"))
    found = gradients(wanted, data(m=3, n=0), {"o": np.ones((2, 3, 6, 3))})
    assert found["q"].shape == (2, 3, 6, 4)
    assert not found["q"].any()
    assert Dim("M") in wanted.q.shape
