"""Trees of drafts, against walks from node to parent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.paging import DraftTrees, pack_bits


def drawn(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    """Parents that come before their children; the first node is a root, and one in ten others."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.stack(
        [torch.randint(-1, max(node, 1), (batch,), generator=generator) for node in range(count)], 1
    )
    parents[:, :1] = -1
    return torch.where(torch.rand(parents.shape, generator=generator) < 0.1, -1, parents)


def walked(parents: list[int]) -> list[set[int]]:
    """What each node sees."""
    seen: list[set[int]] = []
    for node, parent in enumerate(parents):
        seen.append({node} | (seen[parent] if parent >= 0 else set()))
    return seen


@pytest.mark.parametrize("count", [1, 2, 3, 31, 33, 65])
def test_nodes_see_themselves_and_their_ancestors(count: int) -> None:
    parents = drawn(3, count)
    nodes = torch.tensor([count, count // 2, 0], dtype=torch.int32)
    trees = DraftTrees(parents.int(), nodes)
    for b, row in enumerate(parents.tolist()):
        existing = int(nodes[b])
        assert trees.parents[b].tolist() == [*row[:existing], *[-1] * (count - existing)]
        for node, seen in enumerate(walked(row)):
            expected = sorted(seen) if node < existing else []
            assert trees.sees[b, node].nonzero().flatten().tolist() == expected
            assert int(trees.depths[b, node]) == max(len(expected) - 1, 0)


def test_a_chain_is_causal() -> None:
    trees = DraftTrees(torch.arange(-1, 99)[None])
    assert torch.equal(trees.sees[0], torch.ones(100, 100).tril().bool())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dtype", "bits"), [(torch.uint8, 8), (torch.int32, 32), (torch.int64, 64)])
@pytest.mark.parametrize("count", [1, 8, 31, 32, 64, 70])
def test_words_have_the_bits(dtype: torch.dtype, bits: int, count: int) -> None:
    trees = DraftTrees(drawn(2, count, seed=1))
    words = trees.pack(dtype)
    assert words.dtype == dtype
    assert words.shape == (2, count, -(-count // bits))
    found = [
        [[int(words[b, i, j // bits]) >> j % bits & 1 for j in range(count)] for i in range(count)]
        for b in range(2)
    ]
    assert torch.equal(torch.tensor(found).bool(), trees.sees)


def test_words_are_of_the_last_axis() -> None:
    x = (torch.arange(2 * 3 * 37) % 5 < 2).view(2, 3, 37)
    words = pack_bits(x, torch.uint8)
    assert words.shape == (2, 3, 5)
    assert torch.equal((words[..., None] >> torch.arange(8) & 1).flatten(2)[..., :37].bool(), x)


def test_words_of_other_types_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"dtype: expected torch.uint8, torch.int32, torch.int64, got torch.int16"
    ):
        pack_bits(torch.ones(3).bool(), torch.int16)


def test_greedy_acceptance_follows_what_the_model_wants() -> None:
    #        0 (token 5) -> 1 (7), 2 (8); 2 -> 3 (9), 4 (1); 3 -> 5 (2)
    parents = torch.tensor([[-1, 0, 0, 2, 2, 3]] * 4)
    drafted = torch.tensor([[5, 7, 8, 9, 1, 2]] * 4)
    wanted = torch.tensor(
        [
            [8, 0, 9, 2, 0, 4],  # the longest path
            [7, 8, 9, 2, 0, 4],  # a leaf
            [3, 0, 9, 2, 0, 4],  # nothing, though what follows would fit
            [8, 0, 1, 2, 0, 4],  # a branch
        ]
    )
    accepted = DraftTrees(parents, torch.tensor([6, 6, 6, 4])).accept(drafted, wanted)
    assert [row.nonzero().flatten().tolist() for row in accepted] == [[0, 2, 3, 5], [0, 1], [0], [0, 2]]


@pytest.mark.parametrize(
    ("parents", "nodes", "error", "told"),
    [
        ([[0]], None, TypeError, "parents: expected a tensor, got list"),
        (torch.zeros(1, 2), None, TypeError, "parents: expected integers, got torch.float32"),
        (
            torch.zeros(1, 2, dtype=torch.complex64),
            None,
            TypeError,
            "parents: expected integers, got torch.complex64",
        ),
        (torch.zeros(1, 2).bool(), None, TypeError, "parents: expected integers, got torch.bool"),
        (torch.zeros(2).long(), None, ValueError, r"parents: expected 2 axes, got \[2\]"),
        (
            torch.zeros(2, 3).long(),
            torch.zeros(3).long(),
            ValueError,
            r"nodes: expected shape \[2\], got \[3\]",
        ),
    ],
)
def test_mistakes_are_named(parents: Any, nodes: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        DraftTrees(parents, nodes)


def test_tokens_of_another_shape_are_named() -> None:
    trees = DraftTrees(torch.tensor([[-1, 0]]))
    with pytest.raises(ValueError, match=r"wanted: expected shape \[1, 2\], got \[2\]"):
        trees.accept(torch.zeros(1, 2).long(), torch.zeros(2).long())
