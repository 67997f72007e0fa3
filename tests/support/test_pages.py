"""Pages as gradients take them: rows that are copied from pages, and sums of rows by page."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch

from attnc.support.pages import Pages, count_keys, find_pages, gather_rows, lay_rows, sum_rows
from tests.support.in_pages import place_of

#: Orders of the axes of pages, of the keys of a page and of heads, before that of features.
ORDERS = ["".join(order) for order in permutations("pnh")]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers_of(table: list[list[int]], keys: list[int], page: int, count: int) -> torch.Tensor:
    found = torch.empty(len(table), len(table[0]), dtype=torch.int32)
    return find_pages(torch.tensor(table, dtype=torch.int32), torch.tensor(keys), page, count, found)


def test_entries_behind_the_end_and_outside_of_memory_name_no_page() -> None:
    table = [[3, 1, -1, 7], [2, 2, 0, 0]]
    assert numbers_of(table, [9, 4], 4, 4).tolist() == [[3, 1, 4, 4], [2, 4, 4, 4]]
    assert numbers_of(table, [0, 16], 4, 4).tolist() == [[4] * 4, [2, 2, 0, 0]]
    assert numbers_of(table, [16, 16], 4, 0).tolist() == [[0] * 4] * 2


@pytest.mark.parametrize("axes", ORDERS)
def test_rows_are_those_of_their_pages_in_every_order_of_axes(axes: str) -> None:
    page, count, B, P = 3, 5, 2, 2
    sizes = {"p": count, "n": page, "h": 2}
    pages = drawn(*(sizes[axis] for axis in axes), 4)
    numbers = numbers_of([[4, 0], [0, 2]], [6, 5], page, count)
    shape = [{"p": B, "n": P * page, "h": 2}[axis] for axis in axes]
    own = axes.replace("p", "b")
    memory = lay_rows([*shape, 4], own, pages.dtype)
    into = torch.empty_strided(memory.shape, memory.strides)
    gather_rows(pages, numbers, into, own)
    by_page, rows = (x.permute([*map(axes.index, "pnh"), 3]) for x in (pages, into))
    none = torch.zeros(1, *by_page.shape[1:])
    for b in range(B):
        expected = torch.cat([[*by_page, *none][number] for number in numbers[b].tolist()])
        assert torch.equal(rows[b], expected)
    made = torch.empty_like(pages, dtype=torch.float64)
    sum_rows(into, numbers, torch.full((B,), P * page), made, own)
    times = torch.bincount(numbers.flatten().clamp(max=count - 1), minlength=count).view(-1, 1, 1, 1)
    assert torch.equal(made.permute([*map(axes.index, "pnh"), 3]), times * by_page.double())


def test_a_page_gets_the_sum_of_its_rows_in_the_order_of_the_table() -> None:
    """In float32, one after the other, and rounded once: other orders have other bits."""
    page, count, B, P = 2, 3, 4, 3
    rows = drawn(B, P * page, 1, 8) * torch.logspace(-3, 3, B).view(-1, 1, 1, 1)
    table = [[1, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 0]]
    numbers = numbers_of(table, [6] * B, page, count)
    expected = torch.zeros(count, page, 1, 8)
    for b in range(B):
        for column, number in enumerate(table[b]):
            expected[number] += rows[b, column * page : (column + 1) * page]
    keys = torch.full((B,), P * page)
    found, backwards = torch.empty(count, page, 1, 8, dtype=torch.bfloat16), torch.empty(count, page, 1, 8)
    sum_rows(rows, numbers, keys, found, "bnh")
    assert torch.equal(found, expected.bfloat16())
    assert not found[2].any()
    sum_rows(rows.flip(0), numbers.flip(0), keys, backwards, "bnh")
    assert not torch.equal(backwards, expected)


def test_rows_behind_the_end_of_a_sequence_count_for_nothing() -> None:
    """Kernels leave them as they find them."""
    rows, numbers = torch.full((2, 4, 1, 8), torch.nan), torch.tensor([[1, 0], [1, 2]], dtype=torch.int32)
    rows[0, :3], rows[1, :1] = 2.0, 3.0
    found = torch.empty(2, 2, 1, 8)
    sum_rows(rows, numbers, torch.tensor([3, 1]), found, "bnh")
    assert found[..., 0, 0].tolist() == [[2, 0], [5, 2]]


def test_without_pages_or_entries_rows_and_gradients_are_0() -> None:
    rows, numbers = torch.full((2, 4, 1, 8), 7.0), torch.zeros(2, 2, dtype=torch.int32)
    none, three, keys = torch.empty(0, 2, 1, 8), torch.full((3, 2, 1, 8), 9.0), torch.tensor([4, 4])
    sum_rows(rows, numbers, keys, none, "bnh")
    sum_rows(rows[:0], numbers[:0], keys[:0], three, "bnh")
    assert not three.any()
    gather_rows(none, numbers, rows, "bnh")
    assert not rows.any()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at(lens, b)", [3, 0, 8]),
        ("at(lens, b) + M", [5, 0, 8]),
        ("at(ends, b + 1) - at(ends, b)", [2, 0, 5]),
        ("at(lens, b - 1)", [0, 3, 0]),
        ("least(most(at(lens, b), 2), 5)", [3, 2, 5]),
        ("where(at(lens, b) > 2, quotient(at(lens, b), 2), 7)", [1, 7, 6]),
        ("remainder(at(lens, b), 4) + quotient(at(lens, b), b)", [3, 0, 6]),
        ("absolute(at(lens, b) - 4)", [1, 8, 8]),
        ("where((at(lens, b) == 3) | (M < 3) & (b >= 2), 1, 6)", [1, 6, 1]),
        ("where(bit(6, b) == 0, 1, 2)", [1, 2, 2]),
        ("where(real('exp', at(scale, b)) > 2.0, 4, 3)", [3, 4, 3]),
        ("where((at(scale, b) > -inf) & (ratio(at(lens, b), 5) < 1), 1, 2)", [1, 1, 2]),
        ("where(ratio(N, M - 2) == inf, 1, 2)", [1, 1, 1]),
        ("where(at(half, b) * 1.001 > 0.5, 1, 2)", [1, 2, 2]),
        ("5", [5, 5, 5]),
        ("at(nothing, b) + 1", [1, 1, 1]),
        ("at(one)", [6, 6, 6]),
    ],
)
def test_lengths_of_all_sequences(text: str, expected: list[int]) -> None:
    tensors: dict[str, Any] = {
        "lens": torch.tensor([3, -4, 12], dtype=torch.int32),
        "ends": torch.tensor([0, 2, 2, 7], dtype=torch.int32),
        "scale": torch.tensor([0.5, 0.75, 0.0]),
        "half": torch.tensor([0.5, 0.25, 0.0], dtype=torch.bfloat16),
        "nothing": torch.empty(0, dtype=torch.int64),
        "one": torch.tensor(6),
        "dlse": None,
    }
    found = count_keys(text, tensors, {"B": 3, "M": 2, "N": 8})
    assert found.clamp(0, 8).tolist() == expected


def test_a_length_of_each_sequence_is_read_as_it_is() -> None:
    lens = torch.tensor([3, -4, 12], dtype=torch.int32)
    assert count_keys("at(lens, b)", {"lens": lens}, {"B": 3}) is lens
    assert count_keys("at(lens, b)", {"lens": lens.half()}, {"B": 3}).dtype == torch.int64


def test_rows_and_page_numbers_are_written_of_what_is_given() -> None:
    pages = Pages(table="table", page=2, length="at(lens, b)", axes={"k": "bnh", "v": "bhn"})
    given = ("do", "q", *map(pages.own, ("k", "v", "table", "lens")), "o", "lse")
    assert given == ("do", "q", "k in pages", "v in pages", "table", "lens", "o", "lse")
    k, v = drawn(4, 2, 1, 3), drawn(4, 1, 2, 3, seed=1)
    table, lens = torch.tensor([[3, 1], [2, -9]], dtype=torch.int32), torch.tensor([4, 2])
    tensors = [None, torch.zeros(1), k, v, table, lens, torch.zeros(1), torch.zeros(1)]
    numbers, keys = torch.empty(2, 2, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    memory = lay_rows([2, 1, 4, 3], "bhn", torch.float32)
    rows, values = torch.empty(2, 4, 1, 3), torch.empty_strided(memory.shape, memory.strides)
    made = {"_pages": numbers, "k": rows, "dq": torch.empty(0), "_keys": keys, "v": values}
    pages.fill(place_of(given, made, N=4))([*made.values()], tensors)
    assert (numbers.tolist(), keys.tolist()) == ([[3, 1], [2, 4]], [4, 2])
    assert torch.equal(rows[0], torch.cat([k[3], k[1]]))
    assert torch.equal(values[1, :, :2], v[2])
