"""`from generated.NAME import NAME` on a GPU: under torch.compile, with gradients, and where sizes decide."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from attnc.build import compile_spec, support_outputs
from attnc.output import write
from tests.plans import SPECS


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Generated modules, imported as users do."""
    folder = tmp_path_factory.mktemp("project")
    outputs = [x for name in ("causal_gqa", "decode") for x in compile_spec(SPECS / f"{name}.attn").outputs]
    write((*outputs, *support_outputs()), folder / "for_one_import")
    sys.path.insert(0, str(folder))
    yield lambda name: getattr(importlib.import_module(f"for_one_import.{name}"), name)
    sys.path.remove(str(folder))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Causal attention in float64; q, k, v: [B, M, H, D]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    count = (
        torch.full((len(q), 1, 1, 1), keys, device=q.device) if lengths is None else lengths.view(-1, 1, 1, 1)
    )
    at, kv = torch.arange(rows, device=q.device)[:, None], torch.arange(keys, device=q.device)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(kv > at + count - rows, float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def test_causal_gqa_is_compiled_whole_with_its_gradients(package: Any) -> None:
    q = torch.randn(2, 300, 8, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    k, v = (torch.randn(2, 300, 2, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "kv")
    torch.compiler.reset()
    attention = package("causal_gqa")
    compiled = torch.compile(lambda *x: attention(*x)[0] * 2, fullgraph=True)
    o = compiled(q, k, v)
    expected = 2 * exact(q.detach(), k.detach(), v.detach(), None)
    torch.testing.assert_close(o.double(), expected, atol=0.03, rtol=0.03)
    do = torch.randn_like(o)
    wanted = torch.autograd.grad(attention(q, k, v)[0] * 2, (q, k, v), do)
    for x, y in zip(torch.autograd.grad(o, (q, k, v), do), wanted, strict=True):
        torch.testing.assert_close(x, y, atol=0.05, rtol=0.05)  # dq is added up in any order


@pytest.mark.parametrize("dynamic", [False, True])
def test_decode_is_compiled_whole_where_sizes_decide(package: Any, dynamic: bool) -> None:
    attention = package("decode")
    torch.compiler.reset()
    compiled = torch.compile(lambda *x: attention(*x)[0] * 2, fullgraph=True, dynamic=dynamic)
    for batch, keys in ((1, 300), (16, 300), (16, 5000), (1, 12000)):
        q = torch.randn(batch, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, batch, keys, 8, 128, device="cuda", dtype=torch.bfloat16)
        lengths = torch.randint(1, keys + 1, (batch,), device="cuda", dtype=torch.int32)
        expected = 2 * exact(q, k, v, lengths)
        torch.testing.assert_close(compiled(q, k, v, lengths).double(), expected, atol=0.03, rtol=0.03)
