"""Functions as programs run them: from threads at once, in new processes and forks, with data parallelism.
What a GPU adds (graphs, streams) is in `tests/gpu/test_setups.py`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import attnc
from attnc.compat.flash_attn import flash_attn_func
from attnc.distributed.group import on_processes
from attnc.flex import flex_attention
from attnc.verify.interpreter import ensure_interpreter
from tests.api.setups import Attend, Model, run_processes, train_over_ranks

ensure_interpreter()

H, D = 2, 16
SPEC = f"""
attention setup {{
  input q: f32[B, M, {H}, {D}]
  input k, v: f32[B, N, {H}, {D}]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax
  output o: f32[B, M, {H}, {D}]
  grad q, k, v
}}
"""


def of_compile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o: torch.Tensor = attnc.compile(SPEC)(q, k, v)
    return o


def of_flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    turned = [x.transpose(1, 2) for x in (q, k, v)]
    o: torch.Tensor = flex_attention(turned[0], turned[1], turned[2], mask_mod=causal)
    return o.transpose(1, 2)


def of_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o: torch.Tensor = flash_attn_func(q, k, v, causal=True)
    return o


#: Causal attentions.
DOORS: dict[str, Attend] = {
    "attnc.compile": of_compile,
    "flex_attention": of_flex,
    "flash_attn_func": of_flash,
}


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    score = q.transpose(1, 2) @ k.transpose(1, 2).mT / D**0.5
    hidden = torch.ones(score.shape[2:], dtype=torch.bool).triu(1)
    o: torch.Tensor = score.masked_fill(hidden, -torch.inf).softmax(-1) @ v.transpose(1, 2)
    return o.transpose(1, 2)


def check(name: str, length: int, seed: int) -> None:
    """Calls a function with gradients."""
    drawn = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(1, length, H, D, generator=drawn).requires_grad_() for _ in range(3)]
    q, k, v = tensors
    do = torch.randn(q.shape, generator=drawn)
    found, right = ([o, *torch.autograd.grad(o, tensors, do)] for o in (DOORS[name](q, k, v), exact(q, k, v)))
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("empty_cache")
def test_threads_make_their_first_calls_at_once() -> None:
    calls = [(name, 3 + 4 * number, number) for number in range(3) for name in DOORS]
    with ThreadPoolExecutor(6) as crew:
        for made in [crew.submit(check, *call) for call in calls * 2]:
            made.result()


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_new_processes(method: str) -> None:
    """Also forks of a process that has called all functions."""
    for name in DOORS:
        check(name, 5, 0)
    run_processes(method, check, [(name, 9, 1) for name in DOORS], 300)


def _train(rank: int, name: str, is_compiled: bool) -> None:
    data = [torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    train_over_ranks(
        rank,
        partial(Model, DOORS[name], 8, H, D),
        data,
        partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6),
        steps=6,  # from the fifth on calls repeat themselves
        backend="aot_eager" if is_compiled else "",
    )
    assert dist.get_world_size() == 2


@pytest.mark.nightly
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", DOORS)
def test_data_parallelism(name: str, is_compiled: bool) -> None:
    """Gradients over ranks are the mean of those of each rank's data, in every step."""
    on_processes(2, _train, name, is_compiled, deadline=300.0)
