"""The setups that people train and serve in: callables that PyTorch graphs, dropout that each replay draws
anew, threads with streams of their own, new processes, and data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import attnc
from attnc.adapters.transformers import attention
from attnc.compat.flash_attn import flash_attn_func
from attnc.distributed.group import on_processes
from tests.api.setups import Model, run_processes, train_over_ranks
from tests.gpu.test_doors import COMPILED, SPEC, TRAINED, B, D, H, N, exact, inputs, judge

#: Doors whose functions are there without a fixture; and those with dropout, of (q, k, v, p).
DOORS = {name: door for name, door in TRAINED.items() if name != "scaled_dot_product_attention"}
DROPPED: dict[str, Callable[..., torch.Tensor]] = {
    "flash_attn_func": flash_attn_func,
    "transformers": lambda q, k, v, p: drop_in_transformers(q, k, v, p),
}


def drop_in_transformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention(torch.nn.Module(), q, k, v, None, is_causal=False, dropout=p)[0]


@pytest.fixture(autouse=True)
def compiled(device: torch.device) -> None:
    COMPILED[:] = [attnc.compile(SPEC)]


class Layer(torch.nn.Module):
    """Attention as a module of tensors alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return DOORS[self.name](q, k, v)


# PyTorch captures while the outputs of its warm-up on another stream are alive.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("name", DOORS)
def test_pytorch_graphs_a_callable(name: str, device: torch.device) -> None:
    """Forward and backward, each a graph, of other numbers than those they were captured with."""
    samples = tuple(x.detach().requires_grad_() for x in inputs(device, grad=True))
    graphed: Any = torch.cuda.make_graphed_callables(Layer(name), samples)
    tensors = [(2 * x.detach().flip(1)).requires_grad_() for x in inputs(device, grad=False)]
    do = torch.randn(B, N, H, D, device=device).bfloat16()
    for _ in range(2):
        o = graphed(*tensors)
        judge([o, *torch.autograd.grad(o, tensors, do)], exact(name, tensors, do))


@pytest.mark.parametrize("name", DROPPED)
def test_a_graph_draws_another_mask_at_each_replay(name: str, device: torch.device) -> None:
    """The backward has the mask of its forward: o is linear in v, so that with the same mask sum(do o) is
    sum(dv v). The same seed of PyTorch's generator gives the same masks.
    """
    q, k, v = (x.requires_grad_() for x in inputs(device, grad=False))
    do = torch.randn_like(q)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        o = DROPPED[name](q, k, v, 0.3)
        (dv,) = torch.autograd.grad(o, (v,), do)
        return o, dv

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, dv = step()
    found = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        graph.replay()
        left, right = (do.double() * o.double()).sum(), (dv.double() * v.double()).sum()
        size = (do.double() * o.double()).norm()
        assert (left - right).abs() < 0.05 * size
        found.append(o.clone())
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", DOORS)
def test_threads_call_at_once(name: str, device: torch.device) -> None:
    """Each with a stream and sizes of its own, gradients as well; the first calls of all."""
    door = DOORS[name]
    drawn = inputs(device, grad=False)  # by one thread: a seed is that of all, and q and k would be alike
    cotangents = torch.randn_like(drawn[0])
    torch.cuda.synchronize()

    def work(number: int) -> None:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        with torch.cuda.stream(stream):
            for _ in range(6):
                tensors = [x[:, : N - 7 * number].detach().requires_grad_() for x in drawn]
                tensors = (
                    [x.contiguous().detach().requires_grad_() for x in tensors]
                    if "varlen" in name
                    else tensors
                )
                do = cotangents[:, : N - 7 * number].clone()
                o = door(*tensors)
                found.setdefault(number, []).append((tensors, do, [o, *torch.autograd.grad(o, tensors, do)]))
        stream.synchronize()

    found: dict[int, list[Any]] = {}
    numbers = [0] if "varlen" in name else [0, 1, 2, 3]  # that door's lengths are those of the file
    with ThreadPoolExecutor(4) as crew:
        list(crew.map(work, numbers * (4 // len(numbers))))
    for number, calls in found.items():
        for tensors, do, got in calls:
            judge(got, _exact_of(name, tensors, do, N - 7 * number))


def _exact_of(name: str, tensors: list[torch.Tensor], do: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Returns `exact` of shorter sequences."""
    q, k, v = (x.detach().double().requires_grad_() for x in tensors)
    group = q.shape[2] // k.shape[2]
    turned = [q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))]
    score = turned[0] @ turned[1].transpose(2, 3) / D**0.5
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    hidden &= name != "transformers"
    o = (score.masked_fill(hidden, -torch.inf).softmax(-1) @ turned[2]).transpose(1, 2)
    return [o, *torch.autograd.grad(o, (q, k, v), do.double())]


def _attend_here(rank: int, name: str) -> None:
    """In a process that was started for it."""
    device = torch.device("cuda", rank)
    COMPILED[:] = [attnc.compile(SPEC)]
    tensors = inputs(device, grad=True)
    do = torch.randn_like(tensors[0])
    o = DOORS[name](*tensors)
    judge([o, *torch.autograd.grad(o, tensors, do)], exact(name, tensors, do))


@pytest.mark.parametrize("name", ["attnc.compile", "flex_attention", "flash_attn_func"])
def test_processes_that_are_spawned(name: str, device: torch.device) -> None:
    DOORS[name](*inputs(device, grad=False))  # this one has a context, and the kernels
    run_processes("spawn", _attend_here, [(0, name)] * 2, 120)


def _close(mine: torch.Tensor, right: torch.Tensor) -> None:
    assert (mine.float() - right.float()).norm() < 2e-2 * right.float().norm()


def _train(rank: int, name: str, is_compiled: bool) -> None:
    device = torch.device("cuda", rank)
    COMPILED[:] = [attnc.compile(SPEC)]
    drawn = [torch.Generator().manual_seed(n) for n in range(dist.get_world_size())]
    train_over_ranks(
        rank,
        partial(Model, DOORS[name], 64, 2, D, device=device, dtype=torch.bfloat16),
        [torch.randn(2, N, 64, generator=generator).to(device).bfloat16() for generator in drawn],
        _close,
        steps=3,
        backend="inductor" if is_compiled else "",
        device_ids=[rank],
    )


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["attnc.compile", "flex_attention", "flash_attn_func"])
def test_data_parallelism(name: str, is_compiled: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    on_processes(2, _train, name, is_compiled, deadline=180)
