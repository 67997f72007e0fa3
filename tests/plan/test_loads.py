"""What is loaded where: once in a program, or with each tile."""

from __future__ import annotations

import pytest

from attnc.expr.evaluate import evaluate
from attnc.expr.nodes import Dim, Index, walk
from attnc.plan.ir import Statement
from attnc.plan.loads import is_nonnegative, is_positive
from tests.expr.test_meaning import ENV, Draw
from tests.plan.sorted_masks import MASKS, nodes, text_of
from tests.verify.judging import modules_of, spec


@pytest.mark.parametrize(("mask", "order"), [(MASKS[0], "rows"), (MASKS[0], "keys"), (MASKS[4], "rows")])
def test_what_a_tile_test_reads_is_loaded_with_the_tile(mask: str, order: str) -> None:
    (module,) = modules_of(text_of(mask, order, "cuda.sm_80"))
    kernel = module.kernel
    inner = {"q_lo", "q_hi"} if order == "keys" else {"kv_lo", "kv_hi"}
    assert any(_indices(test) & inner for test in kernel.regions.tests)
    assert not any(_indices(item) & inner for item in (*kernel.program, *kernel.regions.bounds))


@pytest.mark.parametrize(("width", "guarded"), [(16, False), (32, True), (64, True)])
def test_columns_of_a_gate_end_before_those_of_a_tile(width: int, guarded: bool) -> None:
    """A tile of o is as wide as one of k, where values are narrower."""
    lines = (
        f"input q: f16[B, M, H, {width}]",
        f"input k: f16[B, N, H, {width}]",
        "input v: f16[B, N, H, 16]",
        "input gate: f16[B, M, H, 16]",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: f16[B, M, H, 16] = gate[b, q_idx, h, d] * attention",
    )
    (module,) = modules_of(spec(lines, "tile.q = 16, tile.kv = 32"))
    assert module.kernel.epilogue is not None
    (fetch,) = module.kernel.epilogue.fetches
    assert (Index("d") in walk(fetch.guard)) == guarded


def _indices(item: Statement) -> set[str]:
    return {node.name for node in nodes(item) if isinstance(node, Index)}


def test_what_is_taken_for_positive_is() -> None:
    """Of random integers, wherever a kernel has something to do."""
    draw = Draw(5)
    for _ in range(300):
        expr = draw.integer(2)
        values = evaluate(expr, ENV)
        assert values.min() >= 0 or not is_nonnegative(expr)
        assert values.min() > 0 or not is_positive(expr)
    assert is_nonnegative(Index("kv_idx"))
    assert not is_nonnegative(Index("q_pos"))
    assert is_positive(Dim("BLOCK_N"))
    assert not is_positive(Dim("N"))
