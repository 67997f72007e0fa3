"""Printed expressions mean what the tree means, with no parenthesis to spare."""

from __future__ import annotations

from math import inf

import pytest

from attnc.expr.nodes import Binary, Call, Const, Dot
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


@pytest.mark.parametrize("value", [1, 0.5, -0.5])
def test_a_constant_is_no_addend_of_a_product_of_triton(value: float) -> None:
    """As an addend it would be what the product begins with, and then be taken for the product."""
    shown = {"1": "s - -1", "0.5": "s - -0.5", "-0.5": "s - 0.5"}[str(value)]
    assert tiled(Binary("+", Const(value), Dot())) == tiled(Binary("+", Dot(), Const(value))) == shown
    least = Call("max", (Dot(), Const(-inf)))
    assert tiled(Binary("+", least, Const(value))) == tiled(least) + shown.removeprefix("s")
    assert tiled(Binary("*", Const(2.0), Binary("+", Dot(), Const(value)))) == f"2.0 * ({shown})"
    assert cuda_scalar(Binary("+", Dot(), Const(0.5))) == "s + 0.5f"


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
