"""PyTorch's attention on attnc on a GPU: calls that take the flash backend, against the math backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.functional import scaled_dot_product_attention

from attnc.compat import run_on, sdpa
from tests.compat.flash_reference import Meaning, both, judge


@pytest.fixture(autouse=True)
def active(device: torch.device) -> Iterator[None]:
    run_on(os.environ.get("ATTNC_GRID_TARGET"))
    sdpa.register()
    activate_flash_attention_impl("attnc")
    yield
    restore_flash_attention_impl()


def results(backend: SDPBackend, tensors: list[torch.Tensor], do: torch.Tensor, **options: Any) -> Any:
    with sdpa_kernel(backend):
        o = scaled_dot_product_attention(tensors[0], tensors[1], tensors[2], **options)
    return o, *torch.autograd.grad(o, tensors, do.to(o.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("shape", [(4, 8), (1, 128), (2, 1000), (1, 2048)], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_forward_and_gradients(
    dtype: torch.dtype, size: int, shape: tuple[int, int], options: dict[str, Any], device: torch.device
) -> None:
    torch.manual_seed(0)
    batch, length = shape
    leaves = [torch.randn(batch, 4, length, size, device=device, dtype=dtype) for _ in range(3)]
    do = torch.randn(batch, 4, length, size, device=device)
    ours = results(SDPBackend.FLASH_ATTENTION, [x.requires_grad_() for x in leaves], do, **options)
    exact = results(SDPBackend.MATH, [x.detach().float().requires_grad_() for x in leaves], do, **options)
    turned = [x.transpose(1, 2) for x in leaves]
    meaning = Meaning(causal=options.get("is_causal", False), scale=options.get("scale"))
    plain = both(turned, meaning)[1][0].transpose(1, 2)
    low = plain, *torch.autograd.grad(plain, leaves, do.to(dtype))
    for name, got, right, rough in zip(("o", "dq", "dk", "dv"), ours, exact, low, strict=True):
        judge(name, got, right, rough, rate=2.0 if name == "o" else 3.0)


#: Of torch's own tests of its flash kernels: head sizes, and batches, queries and keys that meet in them.
HEAD_SIZES = (8, 16, 21, 32, 64, 72, 96, 128, 160, 192, 203, 256)
SHAPES = ((1, 4, 4), (8, 8, 143), (1, 64, 512), (8, 143, 64), (1, 256, 1024), (1, 1024, 256), (1, 2048, 2048))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_the_grid_of_torch(
    size: int, is_causal: bool, is_grouped: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Causal masks are for as many queries as keys alone, as torch's flash backend takes no others."""
    torch.manual_seed(0)
    heads, kv_heads = (8, 2) if is_grouped else (4, 4)
    for batch, rows, keys in SHAPES:
        keys = rows if is_causal else keys
        for scale in (None, 1.0):
            q = torch.randn(batch, heads, rows, size, device=device, dtype=dtype)
            k, v = torch.randn(2, batch, kv_heads, keys, size, device=device, dtype=dtype).unbind()
            options: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": is_grouped}
            do = torch.randn_like(q)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            ours = results(SDPBackend.FLASH_ATTENTION, leaves, do, **options)
            turned = [x.transpose(1, 2) for x in leaves]
            pair = both(turned, Meaning(causal=is_causal, scale=scale))
            exact, rough = (
                (o.transpose(1, 2), *torch.autograd.grad(o, leaves, do.transpose(1, 2).to(o.dtype)))
                for o, _ in pair
            )
            for name, got, right, low in zip(("o", "dq", "dk", "dv"), ours, exact, rough, strict=True):
                judge(name, got, right, low, rate=2.0 if name == "o" else 3.0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_captured_step_with_gradients(is_causal: bool, device: torch.device) -> None:
    """As torch's tests capture its own: the forward and the backward in a graph, replayed on other data."""
    torch.manual_seed(0)
    *still, do = torch.randn(4, 2, 4, 200, 64, device=device, dtype=torch.bfloat16).unbind()

    def step() -> Any:
        leaves = [x.detach().requires_grad_() for x in still]
        return results(SDPBackend.FLASH_ATTENTION, leaves, do, is_causal=is_causal)

    step()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for x in still:
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(torch.equal(ours, right) for ours, right in zip(found, step(), strict=True))


@pytest.mark.filterwarnings(
    "ignore:The CUDA Graph is empty:UserWarning"
)  # one that Inductor makes to begin with
def test_inductor_captures_calls_with_a_scale(device: torch.device) -> None:
    """The scale is a tensor that calls share: one in the memory of a graph would be written over."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 200, 64, device=device, dtype=torch.bfloat16).unbind()

    def attend() -> torch.Tensor:
        return 2 * scaled_dot_product_attention(q, k, v, scale=0.31)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        inside = torch.compile(attend, mode="reduce-overhead")
        found = []
        for _ in range(3):  # as it is, to be captured, and replayed
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch has no types here
            found.append(inside().clone())
        expected = attend()
    assert all(torch.equal(ours, expected) for ours in found)


@pytest.mark.filterwarnings(
    "ignore:The CUDA Graph is empty:UserWarning"
)  # one that Inductor makes to begin with
@pytest.mark.parametrize("grad", [False, True])
def test_inductor_owns_what_leaves_its_graphs(grad: bool, device: torch.device) -> None:
    """What nobody reads leaves a forward with gradients, too: calls without a graph share it."""
    torch.manual_seed(0)
    q, k, v, do = torch.randn(4, 2, 4, 200, 64, device=device, dtype=torch.bfloat16).unbind()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 2 * scaled_dot_product_attention(q, k, v)

    def step(function: Any) -> list[torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch has no types here
        leaves = [x.detach().requires_grad_(grad) for x in (q, k, v)]
        o = function(*leaves)
        return [x.clone() for x in ((o, *torch.autograd.grad(o, leaves, do)) if grad else (o,))]

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        inside = torch.compile(attend, mode="reduce-overhead")
        sdpa._UNREAD.clear()
        found = [step(inside) for _ in range(3)]  # as it is, to be captured, and replayed
        expected = step(attend)
        found += [step(inside) for _ in range(3)]
    assert all(torch.equal(ours, right) for one in found for ours, right in zip(one, expected, strict=True))


def test_dropout_is_that_of_the_forward(device: torch.device) -> None:
    """o is linear in v, so the gradient of v says what the forward did."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 256, 64, device=device, dtype=torch.float16).unbind()
    v.requires_grad_()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    do = torch.randn_like(o)
    (dv,) = torch.autograd.grad(o, v, do)
    forward, backward = (o.double() * do).sum(), (dv.double() * v).sum()
    torch.testing.assert_close(forward, backward, rtol=2e-2, atol=2.0)


def test_varlen_attn(device: torch.device) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="PyTorch 2.10 brought it")
    torch.manual_seed(0)
    ends = torch.tensor([0, 100, 356, 400], dtype=torch.int32, device=device)
    q, k, v = torch.randn(3, 400, 4, 64, device=device, dtype=torch.bfloat16).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = varlen.varlen_attn(q, k, v, ends, ends, 256, 256, window_size=(-1, 0))
    bounds = ends.tolist()
    parts = [[x[None, a:b] for x in leaves] for a, b in pairwise(bounds)]
    pairs = [both(part, Meaning(causal=True)) for part in parts]
    right, plain = (torch.cat([pair[i][0][0] for pair in pairs]) for i in range(2))
    judge("o", o, right, plain)
    do = torch.randn_like(o)
    sets = [torch.autograd.grad(x, leaves, do.to(x.dtype)) for x in (o, right, plain)]
    for name, got, exact, low in zip(("dq", "dk", "dv"), *sets, strict=True):
        judge(name, got, exact, low, rate=3.0)
