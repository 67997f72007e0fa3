"""What an attention declares: params and sizes."""

import pytest

from attnc.expr.nodes import Call, Const, Dim, Expr, Param, walk
from attnc.model.declarations import DEFAULT_HEAD_DIMS
from attnc.model.tensors import Role
from tests.model.resolving import attention_of, plain

BATCH, QUERY, KEY, HEAD, FEATURE = Role.BATCH, Role.QUERY, Role.KEY, Role.HEAD, Role.FEATURE


@pytest.mark.parametrize(
    ("last", "meaning", "params"),
    [
        ("D", Param("D", "int"), ["D"]),
        ("80", Const(80), []),
    ],
)
def test_head_dimension_is_the_last_axis_of_q(last: str, meaning: Expr, params: list[str]) -> None:
    attention = attention_of(
        f"""attention a {{
          input q: f16[B, M, H, {last}]
          input k, v: f16[B, N, H, {last}]
          score = dot(q, k) / sqrt(D) + Dv
          normalize = softmax
          output o: f16[B, M, H, Dv]
        }}"""
    )
    assert Call("sqrt", (meaning,)) in tuple(walk(attention.score))
    assert attention.o.shape[-1] == attention.v.shape[-1] == meaning
    assert [param.name for param in attention.params] == params
    assert all(param.choices == DEFAULT_HEAD_DIMS for param in attention.params)


def test_sizes_that_are_left_open_become_params() -> None:
    attention = attention_of(plain())
    [param] = attention.params
    assert param.choices == (64, 128)
    assert not any(isinstance(axis, Dim) and axis.name == "D" for axis in attention.q.shape)


def test_params_of_every_kind() -> None:
    attention = attention_of(
        plain(
            "param W in {8, 16}, is_causal in {true, false}, scale in {1, 0.5}",
            score="dot(q, k) * scale",
            mask="q_pos - kv_idx < W and (causal or not is_causal)",
        )
    )
    types = {
        node.name: node.type
        for expr in (attention.score, attention.mask)
        for node in walk(expr)
        if isinstance(node, Param)
    }
    assert types == {"W": "int", "is_causal": "bool", "scale": "float"}
