"""What a callable with gradients refuses, keeps, and is to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.plan import ir
from attnc.runtime.loader import load_module
from tests.kernels.test_backward import ALIBI, LENGTHS, SLOPE, draw, written
from tests.plans import module_of


def call(module: ir.Module, **changes: Any) -> Any:
    tensors = draw(module.variant.attention, LENGTHS, {})
    loaded = load_module(module)
    return getattr(loaded, module.variant.attention.name)(*tensors.values(), **changes), tensors


def test_no_gradient_is_lost_silently() -> None:
    planned = written(ALIBI, "q, k, v", SLOPE, "causal")
    attention = planned.variant.attention
    tensors = draw(attention, LENGTHS, {})
    function = getattr(load_module(planned), attention.name)
    with pytest.raises(RuntimeError, match="slope requires a gradient"):
        function(*[x.requires_grad_() for x in tensors.values()])
    with pytest.raises(ValueError, match="out: cannot be given"):
        call(written(ALIBI, "q, k, v, slope", SLOPE, "causal"), out=torch.empty(2, 40, 2, 32))


def test_twice_is_refused() -> None:
    """As in PyTorch's attention a graph of gradients may be made, since others may have asked for it."""
    o, tensors = call(written(ALIBI, "q, k, v, slope", SLOPE, "causal"))
    q, k = tensors["q"], tensors["k"]
    expected = torch.autograd.grad(o.sum(), (q, k), retain_graph=True)
    found = torch.autograd.grad(o.sum(), (q, k), create_graph=True)
    assert all(map(torch.equal, found, expected))
    (other,) = torch.autograd.grad(found[0].detach().sum() + k.square().sum(), k, create_graph=True)
    torch.autograd.grad(other.sum(), k)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(found[0].sum(), q)


def test_without_a_gradient_nothing_is_kept() -> None:
    planned = written(ALIBI, "q, k, v, slope", SLOPE, "causal")
    with torch.no_grad():
        o, _ = call(planned)
    assert o.grad_fn is None
    assert call(planned)[0].grad_fn is not None


def operator(name: str, module: ir.Module) -> Any:
    """The registered operator of a loaded module."""
    loaded: Any = load_module(module)
    assert loaded.CALL.operator.startswith(f"{name}_")
    assert loaded.CALL.register_operators()
    return getattr(torch.ops.attnc, loaded.CALL.operator)


@pytest.mark.slow
def test_the_operator_keeps_the_promises_of_torch() -> None:
    planned = written(ALIBI, "q, k, v, slope", SLOPE, "causal")
    tensors = draw(planned.variant.attention, {**LENGTHS, "B": 1, "M": 17, "N": 18}, {})
    torch.library.opcheck(operator("under_test", planned), (*tensors.values(), ""))


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["local_sink", "dropout", "cross"])
def test_compiles_into_one_graph(name: str) -> None:
    module = module_of(name)
    function = getattr(load_module(module), module.variant.attention.name)
    dims = {"B": 1, "H": 1, "Hkv": 1, "G": 2, "M": 20, "N": 30}
    results = []
    for compiled in (False, True):
        tensors = draw(module.variant.attention, dims, {"p": 0.4})
        call = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
        o, lse = call(*tensors.values())
        (o.float().square().sum() + lse.where(lse.isfinite(), torch.zeros(())).sum()).backward()
        results.append([o, lse, *(tensors[x].grad for x in module.variant.attention.grads)])
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)
