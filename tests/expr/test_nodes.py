"""Spec text of expressions: what is written comes back, with no parenthesis that does nothing."""

import pytest

from attnc.effort import MAX_STEPS, Exhausted, limit_steps
from attnc.expr.nodes import TRUE, And, Compare, Dim, Expr, Index, Search, show, walk
from tests.expr.spell import spell


@pytest.mark.parametrize(
    "text",
    [
        "q_pos - 4 <= kv_idx <= q_pos",
        "a < b < c and c >= d",
        "flag[b] and a < b <= c and d > e >= f and keep[b, kv_idx]",
        "q_pos // 16 * 16 + 16",
        "q_pos // (16 * kv_idx)",
        "a - (b - c) - -d",
        "-(a + b) * c",
        "(a < b or c < d) and not (e < f and flag[b])",
        "a < b or c < d and e < f",
        "not a < b",
        "50 * tanh(dot(q, k) / 50.0)",
        "where(true, abs(kv_idx), min(q_pos, 3))",
        "doc[b, q_pos] == doc[b, kv_idx]",
        "a % (b % c) / (d / e)",
    ],
)
def test_round_trip(text: str) -> None:
    assert show(spell(text)) == text


def test_search() -> None:
    search = Search("lower", "doc", (Index("b"),), (Dim("B"), Dim("N")), spell("q_lo + N"))
    assert show(search) == "first(doc[b, :] >= q_lo + N)"


def test_parents_are_walked_before_their_children_each_time() -> None:
    q, kv, n = Index("q_idx"), Index("kv_idx"), Dim("N")
    causal, inside = Compare("<=", kv, q), Compare("<", kv, n)
    both = And((causal, inside))
    for _ in range(2):
        assert [*map(id, walk(both))] == [*map(id, (both, causal, kv, q, inside, kv, n))]


def test_every_walk_counts_its_nodes() -> None:
    tree: Expr = TRUE
    for _ in range(8):
        tree = And((tree, tree))  # 511 nodes
    with limit_steps():
        for _ in range(MAX_STEPS // 511):
            assert sum(1 for _ in walk(tree)) == 511
        with pytest.raises(Exhausted):
            walk(tree)
