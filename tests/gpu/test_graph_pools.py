"""Calls in the pool of a graph: they run, are captured and replayed there, and keep none of its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.compat.flash_attn import flash_attn_func
from attnc.plan.targets import target_of
from tests.gpu.test_host import Loaded
from tests.tensors import results, same

#: A forward with gradients, and kernels that join the splits of a forward.
NAMES = ("causal_gqa", "decode")
CUDA = ("cuda.sm_80", "cuda.sm_90a")
TARGETS = ("triton", *CUDA)


def loaded(name: str, target: str) -> Loaded:
    major, minor = torch.cuda.get_device_capability()
    if not target_of(target).runs_on(10 * major + minor):
        pytest.skip("for other GPUs")
    return Loaded(name, target)


def called(function: Any, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of a call, and the gradients that it has."""
    found = results(function(*tensors))
    wanted = [x for x in tensors if x.requires_grad]
    if not wanted:
        return found
    gradients = torch.autograd.grad(found[0], wanted, torch.ones_like(found[0]))
    return (*(x.detach() for x in found), *gradients)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_keeps_no_memory_of_the_pool(name: str, target: str) -> None:
    """Inductor runs a call in the pool before it captures it; what is kept of it, replays write over."""
    made = loaded(name, target)
    tensors = made.tensors(gradients=True)
    cuda: Any = torch.cuda  # torch ships it without annotations
    pool, stream = cuda.MemPool(), cuda.Stream()  # a stream that has no counter of tiles yet
    stream.wait_stream(cuda.current_stream())
    # The pool is that of this thread, which computes the gradients too, then.
    own_thread = torch.autograd.set_multithreading_enabled(False)
    with own_thread, cuda.stream(stream), cuda.use_mem_pool(pool):
        found = called(made.function, tensors)
    stream.synchronize()
    assert same(found, called(made.function, tensors))
    del found
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert blocks
    assert not [block for block in blocks if block["state"] == "active_allocated"]


def test_numbers_of_a_call_are_not_in_the_pool() -> None:
    """Those that flash-attention's functions keep on the device for the next call."""
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    options: Any = {"softmax_scale": 0.77, "softcap": 12.5, "window_size": (17, 0)}
    pool: Any = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        found = flash_attn_func(q, q, q, **options)
        del found
    torch.cuda.synchronize()
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert blocks
    assert not [block for block in blocks if block["state"] == "active_allocated"]


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_call_may_be_captured(name: str, target: str) -> None:
    """Code is compiled and loaded while a graph is captured."""
    made = loaded(name, target)
    made.module.CALL.forget()
    made.module.CALL.program.forget()
    tensors = made.tensors()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = called(made.function, tensors)
    graph.replay()
    assert same(found, called(made.function, tensors))


@pytest.mark.filterwarnings(
    "ignore:The CUDA Graph is empty:UserWarning"
)  # one that Inductor makes to begin with
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_inductor_captures_and_replays_calls(name: str, target: str) -> None:
    made = loaded(name, target)
    inside = torch.compile(made.function, fullgraph=True, mode="reduce-overhead")
    for _ in range(2):  # other data
        tensors = made.tensors(gradients=True)
        expected = called(made.function, tensors)
        for _ in range(3):  # as it is, to be captured, and replayed
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch has no types here
            assert same(called(inside, tensors), expected)
