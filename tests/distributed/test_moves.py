"""Rows that move: what is taken of a tensor, put there, and added to it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnc.distributed.moves import places, with_rows

ROWS = 9


@given(st.sets(st.integers(0, ROWS - 1)).map(sorted), st.integers(0, 2), st.booleans())
def test_rows_are_those_of_their_numbers(rows: list[int], axis: int, is_run: bool) -> None:
    """Whether they follow each other or not, along any axis; others are left as they are."""
    if is_run and rows:
        rows = list(range(rows[0], rows[0] + len(rows)))[: ROWS - rows[0]]
    numbers: npt.NDArray[np.int64] = np.asarray(rows, np.int64)
    found = places(numbers, torch.device("cpu"))
    assert found.count == len(rows)
    shape = [2, 3, 2]
    shape[axis] = ROWS
    x, given_ = torch.arange(float(np.prod(shape))).view(shape), torch.from_numpy(numbers)
    some = x.index_select(axis, given_)
    assert torch.equal(found.take(x, axis), some)
    assert with_rows(x, axis, len(rows)) == some.shape
    into = torch.zeros_like(some)
    found.copy(x, axis, into)
    assert torch.equal(into, some)
    y, total = torch.zeros_like(x), torch.ones_like(x)
    found.put(y, axis, some)
    found.add(total, axis, some)
    kept = torch.zeros(ROWS)
    kept[given_] = 1
    expected = x * kept.view([-1 if i == axis else 1 for i in range(3)])
    assert torch.equal(y, expected)
    assert torch.equal(total, 1 + expected)


def test_rows_that_follow_each_other_are_not_copied() -> None:
    x = torch.arange(8.0).view(8, 1)
    assert places(np.arange(3, 6), x.device).take(x, 0).data_ptr() == x[3:].data_ptr()
