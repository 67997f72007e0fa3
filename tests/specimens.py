"""Attentions built by hand, so that these tests need no parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attnc.expr.nodes import TRUE, And, Binary, Call, Compare, Const, Dim, Dot, Expr, Index, Load
from attnc.model.attention import Attention, Softmax
from attnc.model.dtypes import DType
from attnc.model.tensors import Role, Tensor
from attnc.plan.ir import ErrorBound

ROLES: Mapping[str, Role] = {
    "B": Role.BATCH, "M": Role.QUERY, "N": Role.KEY, "H": Role.HEAD, "D": Role.FEATURE, "Dv": Role.FEATURE
}  # fmt: skip
HEADS = Binary("*", Dim("Hkv"), Dim("G"))
Q_POS, KV_IDX, H = Index("q_pos"), Index("kv_idx"), Index("h")
CAUSAL = Compare("<=", KV_IDX, Q_POS)
SCALED = Binary("/", Dot(), Call("sqrt", (Dim("D"),)))
SOFTCAP = Binary("*", Const(30.0), Call("tanh", (Binary("/", SCALED, Const(30.0)),)))


def window(size: int) -> Expr:
    return And((Compare("<=", Binary("-", Q_POS, Const(size)), KV_IDX), CAUSAL))


def tensor(name: str, layout: str, dtype: DType = DType.F32, **sizes: Expr) -> Tensor:
    axes = layout.split()
    shape = tuple(sizes.get(axis, Dim(axis)) for axis in axes)
    return Tensor(name=name, dtype=dtype, shape=shape, roles=tuple(ROLES[axis] for axis in axes))


def per_head(name: str) -> tuple[Tensor, Load]:
    """An f32 input with one number per query head, and the load of head h's."""
    return Tensor(name=name, dtype=DType.F32, shape=(HEADS,)), Load(name, (H,), (HEADS,), "float")


def attention(
    score: Expr = SCALED,
    mask: Expr = TRUE,
    softmax: Softmax | None = None,
    extras: tuple[Tensor, ...] = (),
    *,
    dtype: DType = DType.F32,
    **changes: Any,
) -> Attention:
    """Grouped queries, [B, length, heads, D] as in FlashAttention; changes: other fields of the attention."""
    qkv = (
        tensor("q", "B M H D", dtype, H=HEADS),
        tensor("k", "B N H D", dtype, H=Dim("Hkv")),
        tensor("v", "B N H Dv", dtype, H=Dim("Hkv")),
    )
    base = Attention(
        name="specimen",
        params=(),
        inputs=(*qkv, *extras),
        outputs=(tensor("o", "B M H Dv", dtype, H=HEADS), tensor("lse", "B H M", DType.F32, H=HEADS)),
        lengths={},
        score=score,
        mask=mask,
        softmax=softmax or Softmax(),
        grads=(),
    )
    return replace(base, **changes)


def alibi(dtype: DType) -> Attention:
    slope, load = per_head("slope")
    bias = Binary("*", load, Call("abs", (Binary("-", Q_POS, KV_IDX),)))
    return attention(Binary("-", SCALED, bias), CAUSAL, extras=(slope,), dtype=dtype)


def sinking(dtype: DType) -> Attention:
    sink, load = per_head("sink")
    return attention(SOFTCAP, window(5), Softmax(sink=load), (sink,), dtype=dtype)


def dropping(dtype: DType) -> Attention:
    p, seed = Tensor(name="p", dtype=DType.F32, shape=()), Tensor(name="seed", dtype=DType.I64, shape=())
    softmax = Softmax(dropout=Load("p", (), (), "float"), seed=Load("seed", (), (), "int"))
    return attention(SCALED, CAUSAL, softmax, (p, seed), dtype=dtype)


def error_bound(dtype: DType, head_dim: int, tile_kv: int) -> ErrorBound:
    return ErrorBound(
        head_dim=head_dim,
        input_dtype=dtype,
        p_dtype=dtype,
        o_dtype=dtype,
        tile_kv=tile_kv,
        min_tile_kv=tile_kv,
    )
