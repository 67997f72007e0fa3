"""Launches of CUDA kernels: the caller's stream, threads, captured graphs."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch

from attnc.runtime.loader import load_module
from tests.plans import module_of


@pytest.fixture(scope="module")
def module() -> ModuleType:
    pytest.importorskip("cupy", reason="CUDA kernels are launched through CuPy")
    return load_module(module_of("causal_gqa", "cuda.sm_80", "bf16_d64"))


def tensors(length: int = 64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    return tuple(
        torch.randn((1, length, heads, 64), generator=generator, device="cuda").bfloat16()
        for heads in (8, 2, 2)
    )


def test_the_current_stream_is_used(module: Any) -> None:
    inputs = tensors()
    expected, _ = module.causal_gqa(*inputs)
    cuda: Any = torch.cuda  # torch ships it without annotations
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        cuda._sleep(20_000_000)  # 10 ms: a launch on another stream would be through before
        doubled = tuple(2 * x for x in inputs)
        halved = tuple(0.5 * x for x in doubled)
        found, _ = module.causal_gqa(*halved)
    stream.synchronize()
    assert torch.equal(found, expected)


def test_a_new_thread_can_launch(module: Any) -> None:
    inputs = tensors()
    expected, lse = module.causal_gqa(*inputs)
    out = torch.zeros_like(expected), torch.zeros_like(lse)
    torch.cuda.synchronize()
    thread = threading.Thread(target=module.causal_gqa, args=inputs, kwargs={"out": out})
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(out[0], expected)


def test_a_captured_graph_sees_new_inputs(module: Any) -> None:
    inputs = tensors()
    module.causal_gqa(*inputs)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = module.causal_gqa(*inputs)
    for x in inputs:
        x.copy_(x.flip(1))
    graph.replay()
    expected, _ = module.causal_gqa(*inputs)
    assert torch.equal(found, expected)
