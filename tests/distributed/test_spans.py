"""Spans of tiles are computed by functions of their own: they give what expressions mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.distributed.spans import BLOCK, function_of
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Expr, Search, walk
from attnc.expr.simplify import nnf
from attnc.expr.solve import solve
from tests.distributed.calls import HEADS as CALL_HEADS
from tests.distributed.calls import Call, calls, visibility
from tests.expr.masks import floats, ints, masks, tensors
from tests.expr.spell import spell

BATCH, HEADS, M_, N_ = 3, 2, 7, 9
POSITIONS = ("q_lo", "q_hi", "q_idx", "kv_lo", "kv_hi", "kv_idx")


@st.composite
def environments(draw: st.DrawFn) -> Env:
    """Indices of tiles, each one number or an array of them, some outside; tensors that may be longer than
    sizes say, and lengths that differ.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    count = draw(st.integers(1, 4))

    def index(size: int) -> Any:
        return int(rng.integers(size)) if draw(st.booleans()) else rng.integers(0, size, count)

    indices = {"b": index(BATCH + 1), "h": index(HEADS + 1), **{name: index(N_) for name in POSITIONS}}
    drawn = tensors(rng, BATCH, HEADS, M_, N_ + draw(st.sampled_from((0, 0, 3))))
    dims: dict[str, Any] = {"B": BATCH, "H": HEADS, "M": M_, "N": N_}
    if draw(st.booleans()):
        dims["N"] = rng.integers(0, N_ + 1, count)
    return Env(indices=indices, dims=dims, tensors=drawn)


def searches(expr: Expr) -> list[Expr]:
    """What a mask says of the keys that a tile sees, which looks for places in sorted tables."""
    found = solve(nnf(expr), "kv_idx")
    return [e for e in (found.may_lo, found.may_hi, found.tile_may) if e is not None]


@settings(max_examples=min(settings().max_examples * 2, 200) // 3)
@given(st.one_of(masks(), ints(2), floats()), environments())
def test_functions_give_what_expressions_mean(expr: Expr, env: Env) -> None:
    for each in (expr, *(searches(expr) if expr.type == "bool" else ())):
        np.testing.assert_array_equal(function_of(each)(env), evaluate(each, env))


@given(ints(2), environments(), st.sampled_from((0, 1, 5)))
def test_what_lies_behind_a_table_is_0(expr: Expr, env: Env, columns: int) -> None:
    """Tables that are shorter than sizes say."""
    cut = {name: x[..., :columns] if x.ndim == 2 else x for name, x in env.tensors.items()}
    short = replace(env, tensors=cut)
    np.testing.assert_array_equal(function_of(expr)(short), evaluate(expr, short))


@settings(max_examples=min(settings().max_examples * 2, 200) // 3)
@given(calls(), st.sampled_from((16, 128)))
def test_tiles_see_what_their_rows_see_head_by_head(call: Call, size: int) -> None:
    """And have no rows that no sequence has."""
    spans = visibility(call.mask, call.lengths)
    tiles, sizes = spans.tiles(call.sizes, size), call.sizes
    count = len(tiles.row)
    of_one = len(spans.tiles(replace(sizes, heads=1), size).row)
    of_head = of_one if count != of_one else 0  # a mask may read a table of heads where it decides nothing
    covered = np.zeros((CALL_HEADS, sizes.queries, sizes.keys), np.bool_)
    seen = np.ones((count, -(-sizes.keys // BLOCK)), np.bool_)
    if tiles.seen is not None:
        seen[:] = False
        seen[tiles.seen] = True
    for tile, (row, rows, lo, hi) in enumerate(zip(tiles.row, tiles.rows, tiles.lo, tiles.hi, strict=True)):
        heads = slice(None) if not of_head else slice(tile // of_head, tile // of_head + 1)
        keys = np.zeros(sizes.keys, np.bool_)
        keys[lo : max(hi, lo)] = True
        covered[heads, row : row + rows] |= keys & np.repeat(seen[tile], BLOCK)[: sizes.keys]
    assert not (call.visible() & ~covered).any()
    exists = np.zeros(sizes.queries, np.bool_)
    for b in range(sizes.batch):
        exists[call.of_head(call.mask, b, 0)[0]] = True
    for row, rows in zip(tiles.row, tiles.rows, strict=True):
        assert exists[row : row + rows].all()


@pytest.mark.parametrize("b", [-1, 0, BATCH - 1, BATCH, np.arange(-1, BATCH + 1)], ids=str)
def test_a_row_that_a_table_has_not_is_searched_as_one_of_zeros(b: Any) -> None:
    rng = np.random.default_rng(4)
    indices = {"b": b, "h": 1, **{name: int(rng.integers(N_)) for name in POSITIONS}}
    env = Env(
        indices=indices,
        dims={"B": BATCH, "H": HEADS, "M": M_, "N": N_},
        tensors=tensors(rng, BATCH, HEADS, M_, N_),
    )
    found = searches(spell("doc[b, kv_idx] == doc[b, q_idx] and kv_idx <= q_idx"))
    assert any(isinstance(node, Search) for each in found for node in walk(each))
    for each in found:
        np.testing.assert_array_equal(function_of(each)(env), evaluate(each, env))
