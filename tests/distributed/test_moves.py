"""Rows that move: what is taken of a tensor, put there, and added to it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnc.distributed import ContextParallel
from attnc.distributed.estimate import Strategy
from attnc.distributed.moves import Piece, places, with_rows
from attnc.verify.interpreter import ensure_interpreter
from tests.distributed.specs import SPECS
from tests.distributed.threads import Thread, on_ranks

ensure_interpreter()

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


def test_units_of_rows_lie_where_they_are_said_to() -> None:
    """Of tensors in any order of axes, parts of others among them: units are as long as memory has them."""
    chance = random.Random(0)
    for _ in range(150):
        axes = chance.randint(1, 4)
        order = chance.sample(range(axes), axes)
        sizes = [chance.choice((1, 2, 3, 4)) for _ in range(axes)]
        room = [size + chance.choice((0, 0, 0, 1)) for size in sizes]
        stored = torch.arange(math.prod(room)).view([room[at] for at in order])
        x = stored.permute([order.index(at) for at in range(axes)])[tuple(map(slice, sizes))]
        axis = chance.randrange(axes)
        piece = Piece(x, axis)
        inner = math.prod(sizes[axis + 1 :])
        wanted = max(math.prod(sizes[at:]) for at in range(axis + 1, axes + 1) if _is_run(x, at))
        assert piece.unit == wanted, (sizes, x.stride(), axis)
        assert piece.rows == sizes[axis]
        rows = np.asarray(sorted(chance.sample(range(sizes[axis]), chance.randint(0, sizes[axis]))), np.int64)
        lead = math.prod(sizes[:axis])
        expected = x.reshape(lead, sizes[axis], inner)[:, torch.from_numpy(rows)]
        for unit in {piece.unit, 1}:
            at = torch.from_numpy(piece.offsets(rows, unit))
            assert at.shape == piece.units(len(rows), unit)
            found = stored.flatten()[at[..., None] + torch.arange(unit)]
            assert torch.equal(found.reshape(expected.shape), expected)
            message = piece.message(7, len(rows), unit)
            assert message.ravel().tolist() == list(range(7, 7 + expected.numel(), unit))
        assert piece.shape(5) == (*sizes[:axis], 5, *sizes[axis + 1 :])


def _is_run(x: torch.Tensor, first: int) -> bool:
    """Returns whether the last axes, from one on, lie in memory one element after the other."""
    part = x[(0,) * first]
    return part.numel() == 1 or part.is_contiguous()


@pytest.mark.parametrize("strategy", ["need", "heads"])
def test_keys_may_lie_otherwise_in_every_call(strategy: Strategy) -> None:
    """What is known of one call, such as where the rows lie that are sent, says nothing of how others lie."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 45, heads, 16, generator=generator) for heads in (4, 2, 2)]
    ways: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        torch.clone,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    )

    def work(group: Thread) -> None:
        cp = ContextParallel(SPECS["causal"], group, strategy=strategy)
        shards, first = cp.shard(*whole), list[torch.Tensor]()
        for way_of_k, way_of_v in ((0, 0), (0, 1), (2, 1)):
            laid = zip(shards, (0, way_of_k, way_of_v), strict=True)
            q, k, v = (ways[way](x).detach().requires_grad_() for x, way in laid)
            o, _ = cp(q, k, v)
            found = [o, *torch.autograd.grad(o.sum(), (q, k, v))]
            first = first or found
            assert all(map(torch.equal, found, first)), (way_of_k, way_of_v)

    on_ranks(2, work)
