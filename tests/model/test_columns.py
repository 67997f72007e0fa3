"""Which scales of columns of k and v can be written: numbers that are loaded, and powers of two."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import Binary, Call, Const, Dim, Expr, Index, Load
from attnc.model.columns import find_column_mistake, is_shared, reads_columns
from tests.verify.judging import modules_of, spec

COLUMN = Binary("//", Index("d"), Const(32))


def load(*indices: Expr, kind: str = "float") -> Load:
    return Load("s", indices, tuple(Const(8) for _ in indices), kind)  # type: ignore[arg-type]  # its type


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (load(Index("b"), Index("kv_idx"), COLUMN), ""),
        (Call("exp2", (Binary("-", load(COLUMN, kind="int"), Const(127)),)), ""),
        (Call("exp2", (load(COLUMN),)), "the scale of columns of k is computed"),
        (Binary("*", load(COLUMN), Const(2.0)), "the scale of columns of k is computed"),
        (load(Index("q_idx"), COLUMN), "the scale of columns of k differs from query to query"),
    ],
)
def test_what_a_scale_of_columns_may_be(scale: Expr, told: str) -> None:
    assert reads_columns(scale)
    assert find_column_mistake(scale, "k") == told


def test_heads_of_a_group_share_a_scale() -> None:
    group = Binary("//", Index("h"), Dim("G"))
    assert is_shared(load(group, COLUMN))
    assert is_shared(load(COLUMN))
    assert not is_shared(load(Index("h"), COLUMN))
    assert not reads_columns(load(group))
    assert not reads_columns(None)


def test_an_attention_knows_the_scales_of_its_columns() -> None:
    lines = [
        "input q: bf16[B, M, H, 64]",
        "input k, v: e4m3[B, N, H, 64]",
        "input ks, vs: f32[B, N, H, 2]",
        "let s = dot(q, k * ks[b, kv_idx, h, d // 32])",
        "score = where(kv_idx < 4, s, 0.5 * s)",
        "normalize = softmax(v_scale = vs[b, kv_idx, h, d // 32])",
        "output o: bf16[B, M, H, 64]",
    ]
    (module,) = modules_of(spec(lines))
    found = module.variant.attention
    assert [(name, scale) for name, scale in found.column_scales.items()] == [
        ("k", found.k_scale),
        ("v", found.softmax.v_scale),
    ]
    assert found.softmax.of_rows is None
    assert not found.softmax.scales_keys
