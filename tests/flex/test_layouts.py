"""How results lie in memory: as queries do, whatever the order of their axes, by torch's rule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from torch._inductor.ir import get_stride_order

from attnc.flex import flex_attention, layouts
from attnc.flex.layouts import as_logical, as_written, laid_out, order_like
from tests.flex.oracle import compare_strides, permute_strides, torch_flex

ORDERS = list(permutations(range(4)))
#: Of the installed torch, for queries whose rows are not whole.
KEEPS_ROWS = permute_strides(torch.empty(1, 1, 2, 2), (4, 4, 1, 2)).stride(3) == 1


@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (2, 1, 5, 16), (1, 1, 1, 16), (4, 2, 1, 16), (1, 3, 5, 1)])
@pytest.mark.parametrize("keeps_rows", [False, True])
def test_the_order_of_a_query(
    shape: tuple[int, ...], keeps_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Inductor sees it, whichever axes have one element; torch has kept rows whole from 2.11 on."""
    monkeypatch.setattr(layouts, "_KEEPS_ROWS", keeps_rows)
    for order in ORDERS:
        query = torch.empty([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(4)])
        o = _result_like(shape, query)
        if keeps_rows == KEEPS_ROWS:
            compare_strides(o, query)
        if not keeps_rows or query.stride(3) == 1:
            assert get_stride_order(o.stride()) == get_stride_order(query.stride())
        elif keeps_rows:
            assert o.stride(3) == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_strides_of_a_result_are_torchs(seed: int) -> None:
    """Of parts of larger tensors, in any order, and of what is expanded."""
    chance = random.Random(seed)
    for _ in range(60):
        shape = [chance.choice((1, 1, 2, 3, 4)) for _ in range(3)]
        order, width = chance.sample(range(4), 4), chance.choice((1, 2, 5))
        shape.append(width)
        stored = torch.empty([shape[axis] + chance.choice((0, 0, 1, 2)) for axis in order])
        query = stored.permute([order.index(axis) for axis in range(4)])
        query = query[tuple(slice(size) for size in shape)]
        shape.pop()
        if chance.random() < 0.2:
            query = query[:1].expand(shape[0], -1, -1, -1)
        wanted = (*shape, chance.choice((width, 1, 7)))
        compare_strides(_result_like(wanted, query), query)


def _result_like(shape: Sequence[int], query: torch.Tensor) -> torch.Tensor:
    """Returns a result of this shape that lies as a query does."""
    axes = order_like(shape, query)
    sizes = dict(zip("BHMD", shape, strict=True))
    written = torch.randn([sizes[axis] for axis in (*axes.replace("D", ""), "D")])
    o = laid_out(as_logical(written, axes), axes)
    assert o.shape == (*shape,)
    assert torch.equal(as_written(o, axes), written)
    return o


@pytest.mark.one_in(6)
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_results_are_laid_out_as_queries(order: tuple[int, ...], is_compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = [torch.randn(2, 3, 4, 16, generator=generator).permute(order) for _ in range(3)]
    q, k, v = (x.requires_grad_() for x in stored)
    attend = (
        torch.compile(flex_attention, backend="aot_eager", fullgraph=True) if is_compiled else flex_attention
    )
    o = attend(q, k, v)
    compare_strides(o, q)
    torch.testing.assert_close(
        o.double(), torch_flex(q.detach(), k.detach(), v.detach(), None, None), rtol=1e-4, atol=1e-5
    )
    found = torch.autograd.grad(o, stored, torch.ones_like(o))
    expected = torch.autograd.grad(
        torch.nn.functional.scaled_dot_product_attention(q, k, v), stored, torch.ones_like(o)
    )
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-4)


def test_a_broadcast_query_has_a_result_of_its_own() -> None:
    q = torch.randn(1, 1, 5, 16).expand(2, 3, 5, 16)
    o = flex_attention(q, q, q)
    o += 1  # which elements that share memory would refuse
    assert o.shape == q.shape
