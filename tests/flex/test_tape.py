"""What the data of a captured tensor says of it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnc.flex.tape import _looked_at


@given(st.lists(st.lists(st.integers(-2, 3), min_size=3, max_size=3), max_size=3), st.booleans())
def test_data_is_sorted_by_rows_and_natural_where_it_is(rows: list[list[int]], is_flat: bool) -> None:
    x = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), 3)
    if is_flat:
        x, rows = x.flatten(), [[value for row in rows for value in row]]
    is_sorted = all(row == sorted(row) for row in rows)
    assert tuple(_looked_at(x)) == (is_sorted, all(value >= 0 for row in rows for value in row))


def test_a_number_is_sorted() -> None:
    assert tuple(_looked_at(torch.tensor(3))) == (True, True)
    assert tuple(_looked_at(torch.tensor(-3))) == (True, False)
