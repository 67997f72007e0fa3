"""How results lie in memory: as queries do, whatever the order of their axes."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from torch._inductor.ir import get_stride_order

from attnc.flex import flex_attention
from attnc.flex.layouts import as_logical, as_written, laid_out, order_like
from tests.flex.oracle import torch_flex

#: The module is hidden behind the operator of its name.
permute_strides = sys.modules["torch._higher_order_ops.flex_attention"]._permute_strides
ORDERS = list(permutations(range(4)))


@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (2, 1, 5, 16), (1, 1, 1, 16), (4, 2, 1, 16), (1, 3, 5, 1)])
def test_the_order_of_a_query(shape: tuple[int, ...]) -> None:
    """As Inductor sees it, whichever axes have one element."""
    for order in ORDERS:
        query = torch.empty(shape).permute(order)
        o = _result_like(query.shape, query)
        assert get_stride_order(o.stride()) == get_stride_order(query.stride())


@pytest.mark.parametrize("seed", range(3))
def test_the_strides_of_a_result_are_torchs(seed: int) -> None:
    """Of queries whose rows are contiguous: parts of larger tensors, and what is expanded."""
    chance = random.Random(seed)
    for _ in range(60):
        shape = [chance.choice((1, 1, 2, 3, 4)) for _ in range(3)]
        order, width = chance.sample(range(3), 3), chance.choice((1, 2, 5))
        stored = torch.empty([shape[axis] + chance.choice((0, 0, 1, 2)) for axis in order] + [width])
        query = stored.permute([*(order.index(axis) for axis in range(3)), 3])
        query = query[tuple(slice(size) for size in shape)]
        if chance.random() < 0.2:
            query = query[:1].expand(shape[0], -1, -1, -1)
        wanted = (*shape, chance.choice((width, 1, 7)))
        found, expected = _result_like(wanted, query), permute_strides(torch.empty(wanted), query.stride())
        assert found.shape == expected.shape
        for size, ours, theirs in zip(wanted, found.stride(), expected.stride(), strict=True):
            assert size == 1 or ours == theirs, (wanted, query.stride(), found.stride(), expected.stride())


def _result_like(shape: Sequence[int], query: torch.Tensor) -> torch.Tensor:
    """Returns a result of this shape that lies as a query does."""
    axes = order_like(shape, query)
    sizes = dict(zip("BHMD", shape, strict=True))
    written = torch.randn([sizes[axis] for axis in (*axes.replace("D", ""), "D")])
    o = laid_out(as_logical(written, axes), axes)
    assert o.shape == (*shape,)
    assert torch.equal(as_written(o, axes), written)
    return o


@pytest.mark.one_in(3)
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
    assert get_stride_order(o.stride()) == get_stride_order(q.stride())
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
