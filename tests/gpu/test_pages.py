"""Sums of rows by page on a GPU: in the order of the table, which is that of a loop on a CPU."""

from __future__ import annotations

import pytest
import torch

from attnc.support.memory import memory_of
from attnc.support.pages import count_keys, find_pages, sum_pages


@pytest.mark.parametrize("pages", [1, 7, 300])
@pytest.mark.parametrize("inner", [(1, 1, 16), (16, 2, 64), (64, 1, 576)], ids=str)
def test_sums_have_the_bits_of_a_loop_over_the_entries(pages: int, inner: tuple[int, int, int]) -> None:
    page, heads, columns = inner
    make = torch.Generator().manual_seed(pages)
    table = torch.randint(-1, pages, (6, 50), generator=make, dtype=torch.int32)
    keys = torch.tensor([50 * page, 0, 49 * page, 1, 20 * page, 50 * page])
    numbers = find_pages(table, keys, page, pages, torch.empty(6, 50, dtype=torch.int64))
    rows = torch.randn(6, 50 * page, heads, columns, generator=make)
    rows *= torch.logspace(-4, 4, 6).view(-1, 1, 1, 1)
    like = memory_of(torch.empty(pages, page, heads, columns))
    expected = sum_pages(rows, numbers, like, "bnh", torch.float32)
    for _ in range(3):
        found = sum_pages(rows.cuda(), numbers.cuda(), like, "bnh", torch.float32)
        assert torch.equal(found.cpu(), expected)


def test_page_numbers_are_those_of_a_cpu() -> None:
    table = torch.randint(-5, 40, (9, 11), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(9) * 20
    expected = find_pages(table, keys, 16, 30, torch.empty(9, 11, dtype=torch.int64))
    found = find_pages(table.cuda(), keys.cuda(), 16, 30, expected.cuda().zero_())
    assert torch.equal(found.cpu(), expected)


def test_lengths_are_counted_in_a_graph() -> None:
    """Nothing is copied from the host."""
    lens = torch.tensor([3, 20, -4], dtype=torch.int32, device="cuda")
    text = (
        "where((at(lens, b) > 2) | (at(lens, 1) == M), least(quotient(at(lens, b), 2), 7), remainder(M, 3))"
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = count_keys(text, {"lens": lens}, {"B": 3, "M": 5, "N": 8})
        five = count_keys("5", {"lens": lens}, {"B": 3, "M": 5, "N": 8})
    for values, expected in (((3, 20, -4), [1, 7, 2]), ((0, 5, 6), [0, 2, 3])):
        lens.copy_(torch.tensor(values))
        graph.replay()
        assert found.tolist() == expected
        assert five.tolist() == [5] * 3
