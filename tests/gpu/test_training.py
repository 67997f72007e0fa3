"""What a training step does with a generated kernel on a GPU: no waiting, graphs, compilation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attnc.build import front, plan_program
from attnc.model.attention import Attention
from attnc.runtime.loader import load_module
from attnc.support.arguments import DTYPES
from attnc.verify.case import Case
from attnc.verify.problem import build
from attnc.verify.strategies import free_dims
from tests.plans import SPECS

SIZES = {"B": 2, "M": 200, "N": 200, "H": 4, "Hkv": 2, "G": 2}
#: GQA, a sink, dropout with a scalar, a bias, documents, packed sequences.
NAMES = ("causal_gqa", "local_sink", "dropout", "bias", "document", "varlen")
Tensors = dict[str, torch.Tensor]


class Training:
    """One step of a module: outputs and gradients of tensors that stay where they are."""

    def __init__(self, name: str, seed: int = 0) -> None:
        module = plan_program(front(SPECS / f"{name}.attn")).modules[0]
        if module.backward is None:
            pytest.skip(f"{name} has no gradients")
        self.attention: Attention = module.variant.attention
        self.function: Callable[..., Any] = getattr(load_module(module), self.attention.name)
        self.inputs = self.draw(seed)
        self.cotangents: list[torch.Tensor] = [torch.randn_like(x) for x in self.outputs(self.inputs)]

    def draw(self, seed: int) -> Tensors:
        sizes = {dim: SIZES[dim] for dim in free_dims(self.attention)}
        found = {}
        values = build(self.attention, Case(dims=sizes, seed=seed), device="cuda").inputs
        for tensor in self.attention.inputs:
            value = torch.as_tensor(values[tensor.name], dtype=DTYPES[tensor.dtype], device="cuda")
            found[tensor.name] = value.clone().requires_grad_(tensor.name in self.attention.grads)
        return found

    def outputs(self, inputs: Tensors) -> list[torch.Tensor]:
        found = self.function(*inputs.values())
        return list(found) if isinstance(found, tuple) else [found]

    def step(self, function: Callable[..., Any] | None = None) -> list[torch.Tensor]:
        found = (function or self.function)(*self.inputs.values())
        outputs = list(found) if isinstance(found, tuple) else [found]
        wanted = [self.inputs[name] for name in self.attention.grads]
        return [*outputs, *torch.autograd.grad(outputs, wanted, self.cotangents)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(left, right, strict=True))


@contextmanager
def without_waiting() -> Iterator[None]:
    """Within it, waiting for the GPU raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_the_gpu(name: str) -> None:
    training = Training(name)
    training.step()
    with without_waiting():
        training.step()


# torch says so of leaves that are used on a second stream, as every capture after a warm-up does
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_graph_computes_the_same(name: str) -> None:
    """Forward and backward in one CUDA graph, replayed on other values in the same memory."""
    training = Training(name)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch annotates it so
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        training.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = training.step()
    for _ in range(2):
        with torch.no_grad():
            for kept in training.inputs.values():
                if kept.is_floating_point():
                    kept.uniform_()
        graph.replay()
        assert same(captured, training.step())


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_agree_bit_for_bit(name: str) -> None:
    training = Training(name)
    assert same(training.step(), training.step())


@pytest.mark.parametrize("name", ["causal_gqa", "dropout"])
def test_compiled_code_has_one_graph_and_the_same_values(name: str) -> None:
    training = Training(name)
    compiled = torch.compile(training.function, fullgraph=True)
    assert same(training.step(compiled), training.step())
