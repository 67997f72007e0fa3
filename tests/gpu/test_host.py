"""What the host does around kernels on a GPU: prepared, compiled and captured calls, and their cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnc.bench.host_cost import SIZES
from attnc.runtime.loader import load_module
from attnc.runtime.trial import problem_for
from tests.plans import module_of
from tests.targets import TARGETS, skip_without_launcher
from tests.tensors import results, same, shifted, spread

#: Microseconds of the host for a call; 15.6 at most where PyTorch's own attention takes 19.2.
MOST = 20.0


class Loaded:
    """A module of a spec, and tensors for it."""

    def __init__(self, name: str, target: str = "triton") -> None:
        skip_without_launcher(target)
        self.planned = module_of(name, target)
        self.module: Any = load_module(self.planned)
        self.function: Callable[..., Any] = getattr(self.module, name)

    def tensors(self, gradients: bool = False) -> list[torch.Tensor]:
        wanted = self.planned.variant.attention.grads if gradients else ()
        sizes = SIZES | ({"M": 1} if self.planned.kernel.structure == "decode" else {})
        made = problem_for(self.planned, 200, sizes=sizes)
        return [
            x.clone().requires_grad_(arg.tensor.name in wanted)
            for arg, x in zip(self.planned.args, made, strict=True)
        ]


def close(left: Any, right: Any) -> None:
    """Of the same values, summed in another order where tiles come another way."""
    for a, b in zip(results(left), results(right), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["causal_gqa", "bias"])
def test_prepared_calls_serve_whatever_comes(name: str, target: str) -> None:
    """Addresses, strides, alignment, outputs of the caller: each twice, so that it is prepared."""
    made = Loaded(name, target)
    tensors = made.tensors()
    expected = made.function(*tensors)
    for change in (torch.clone, spread, shifted, torch.clone, spread, shifted, torch.clone):
        q, k, v = map(change, tensors[:3])
        close(made.function(q, k, v, *tensors[3:]), expected)
        for place in (torch.empty_like, lambda x: spread(torch.empty_like(x)), shifted):
            out = (place(results(expected)[0]), *map(torch.empty_like, results(expected)[1:]))
            made.function(q, k, v, *tensors[3:], out=out if len(out) > 1 else out[0])
            close(out, expected)


@pytest.mark.parametrize("target", TARGETS)
def test_prepared_gradients_are_the_first(target: str) -> None:
    made = Loaded("bias", target)
    found = []
    for _ in range(3):
        tensors = made.tensors(gradients=True)
        o = results(made.function(*tensors))[0]
        o.float().square().sum().backward()  # type: ignore[no-untyped-call]  # torch's
        found.append([x.grad for x in tensors if x.grad is not None])
    assert len(found[0]) > 3
    for later in found[1:]:
        for first, second in zip(found[0], later, strict=True):
            torch.testing.assert_close(first, second)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["causal_gqa", "decode"])
def test_prepared_calls_are_captured(name: str, target: str) -> None:
    made = Loaded(name, target)
    tensors = made.tensors()
    made.function(*tensors)
    made.function(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made.function(*tensors)
    for x in tensors[:3]:
        x.copy_(x.flip(1))
    graph.replay()
    assert same(found, made.function(*tensors))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["causal_gqa", "decode"])
def test_compiled_calls_are_eager_ones(name: str, target: str) -> None:
    made = Loaded(name, target)
    torch.compiler.reset()
    compiled: Any = torch.compile(made.function, fullgraph=True)
    tensors = made.tensors()
    expected = made.function(*tensors)
    assert same(compiled(*tensors), expected)
    out = tuple(map(torch.empty_like, results(expected)))
    compiled(*tensors, out=out, config=made.module.CONFIGS[0])
    assert same(out, made.function(*tensors, config=made.module.CONFIGS[0]))


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_gradients_are_eager_ones(target: str) -> None:
    made = Loaded("causal_gqa", target)
    torch.compiler.reset()
    compiled: Any = torch.compile(made.function, fullgraph=True)
    found = []
    for function in (made.function, compiled):
        tensors = made.tensors(gradients=True)
        results(function(*tensors))[0].float().square().sum().backward()  # type: ignore[no-untyped-call]  # torch's
        found.append([x.grad for x in tensors])
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(eager, traced)


def host_microseconds(call: Callable[[], object]) -> float:
    """Of the fastest burst; bursts, so that the queue of launches does not fill."""
    for _ in range(3):
        call()
    best = float("inf")
    for _ in range(40):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(50):
            call()
        best = min(best, (time.perf_counter() - started) / 50)
    return best * 1e6


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["causal_gqa", "bias", "varlen", "decode", "unified_decode"])
def test_a_call_costs_the_host_little(name: str, target: str) -> None:
    made = Loaded(name, target)
    tensors = made.tensors()
    assert host_microseconds(lambda: made.function(*tensors)) < MOST
