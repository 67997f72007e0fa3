"""Every function that users call runs Hopper's kernels on a Hopper: results, gradients, torch.compile without
a break in the graph, captured graphs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

import attnc
from attnc.adapters.pages import attend
from attnc.adapters.transformers import attention
from attnc.api import compile as compiling
from attnc.api.fastest import HOPPER
from attnc.compat import run_on, sdpa
from attnc.compat.export import kernel_files, python_files
from attnc.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from attnc.compat.form import Form
from attnc.flex import flex_attention

#: A function of q [B, M, H, D], k and v [B, N, Hkv, D], M = N, that returns o like q.
Door: TypeAlias = Callable[..., torch.Tensor]
B, N, H, HKV, D = 2, 300, 8, 2, 128
PAGE = 16

SPEC = f"""
attention door {{
  input q: bf16[B, M, Hkv * G, {D}]
  input k, v: bf16[B, N, Hkv, {D}]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax
  output o: bf16[B, M, Hkv * G, {D}]
  grad q, k, v
}}
"""


#: What `attnc.compile` made of it.
COMPILED: list[attnc.Family] = []


def of_compile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o: torch.Tensor = COMPILED[0](q, k, v)
    return o


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def of_flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    o: torch.Tensor = flex_attention(turned[0], turned[1], turned[2], mask_mod=causal, enable_gqa=True)
    return o.transpose(1, 2)


def of_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o: torch.Tensor = flash_attn_func(q, k, v, causal=True)
    return o


def of_same_bits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o: torch.Tensor = flash_attn_func(q, k, v, causal=True, deterministic=True)
    return o


def ends_of(q: torch.Tensor) -> torch.Tensor:
    return torch.arange(B + 1, dtype=torch.int32, device=q.device) * N


def of_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    ends = ends_of(q)
    o: torch.Tensor = flash_attn_varlen_func(packed[0], packed[1], packed[2], ends, ends, N, N, causal=True)
    return o.view(q.shape)


def of_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    attend_all = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = attend_all(turned[0], turned[1], turned[2], is_causal=True, enable_gqa=True)
    return o.transpose(1, 2)


def of_transformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An encoder: no mask."""
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    return attention(torch.nn.Module(), turned[0], turned[1], turned[2], None, is_causal=False)[0]


def of_engines(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """New tokens against pages, as the plug-ins of vLLM and SGLang call it."""
    k_pages, v_pages, table, lengths = paged(k, v)
    out = torch.empty_like(q)
    attend(
        q.flatten(0, 1), k_pages, v_pages, out.flatten(0, 1), cu_seqlens_q=ends_of(q), seqused_k=lengths,
        block_table=table, scale=D**-0.5, left=-1, softcap=0.0, by_head={}, tokens=0,
    )  # fmt: skip
    return out


def of_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k_pages, v_pages, table, lengths = paged(k, v)
    options: dict[str, Any] = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    o: torch.Tensor = flash_attn_with_kvcache(q, k_pages, v_pages, **options)
    return o


def paged(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    count = -(-N // PAGE)
    pages = []
    for x in (k, v):
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, count * PAGE - N))
        pages.append(padded.view(B * count, PAGE, HKV, D))
    table = torch.arange(B * count, dtype=torch.int32, device=k.device).view(B, count)
    return *pages, table, torch.full((B,), N, dtype=torch.int32, device=k.device)


TRAINED: dict[str, Door] = {
    "attnc.compile": of_compile,
    "flex_attention": of_flex,
    "flash_attn_func": of_flash,
    "flash_attn_func, the same bits": of_same_bits,
    "flash_attn_varlen_func": of_varlen,
    "scaled_dot_product_attention": of_sdpa,
    "transformers": of_transformers,
}
SERVED: dict[str, Door] = {"engines": of_engines, "flash_attn_with_kvcache": of_cache}


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for a Hopper GPU")
    pytest.importorskip("cupy")
    run_on(None)
    COMPILED[:] = [attnc.compile(SPEC)]
    sdpa.register()
    activate_flash_attention_impl("attnc")
    torch.compiler.reset()
    for made in of_hopper():
        made.forget()
    yield
    restore_flash_attention_impl()


def of_hopper() -> list[Any]:
    """The calls of all kernels of wgmma that there are in this process."""
    families = [family for family in compiling._FAMILIES.values() if family.target == HOPPER]
    return [vars(getattr(one.module, variant))["CALL"] for one in families for variant in one.variants]


def inputs(device: torch.device, *, grad: bool, width: int = D) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((B, N, H, width), (B, N, HKV, width), (B, N, HKV, width))
    return [torch.randn(shape, device=device).bfloat16().requires_grad_(grad) for shape in shapes]


def exact(name: str, tensors: list[torch.Tensor], do: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Returns o, and gradients for do, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in tensors)
    turned = [q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(H // HKV, 1) for x in (k, v))]
    score = turned[0] @ turned[1].transpose(2, 3) / q.shape[-1] ** 0.5
    hidden = torch.ones(N, N, dtype=torch.bool, device=q.device).triu(1)
    hidden &= name != "transformers"
    o = (score.masked_fill(hidden, -torch.inf).softmax(-1) @ turned[2]).transpose(1, 2)
    return [o, *(torch.autograd.grad(o, (q, k, v), do.double()) if do is not None else ())]


def judge(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for got, expected in zip(found, right, strict=True):
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-2


def assert_ran(*, gradients: bool) -> None:
    calls = of_hopper()
    assert any(call.prepared for call in calls)
    if gradients:
        assert any(call.prepared_gradients for call in calls)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str, is_compiled: bool, device: torch.device) -> None:
    door = torch.compile(TRAINED[name], fullgraph=True) if is_compiled else TRAINED[name]
    tensors = inputs(device, grad=True)
    do = torch.randn_like(tensors[0])
    o = door(*tensors)
    gradients = torch.autograd.grad(o, tensors, do)
    judge([o, *gradients], exact(name, tensors, do))
    assert_ran(gradients=True)


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_in_batches(name: str, device: torch.device) -> None:
    """Backward runs in a thread of its own, which knows nothing of the batch but what tensors have."""
    tensors = inputs(device, grad=True)
    many = torch.stack([torch.randn_like(tensors[0]) for _ in range(2)])
    o = TRAINED[name](*tensors)
    found = torch.autograd.grad(o, tensors, many, is_grads_batched=True)
    for number, do in enumerate(many):
        judge([o, *(x[number] for x in found)], exact(name, tensors, do))


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop because we have not yet implemented the batch"
)
@pytest.mark.parametrize("name", TRAINED)
def test_transforms(name: str, device: torch.device) -> None:
    """Gradients of each sample, by torch.func; torch's operators are called for each with a warning."""
    q, k, v = inputs(device, grad=False)
    do, door = torch.randn_like(q), TRAINED[name]

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (door(q, k, v) * do).sum()

    qs = torch.stack([q, q.flip(0)])
    gradients: Any = torch.func.grad(loss, argnums=(0, 1, 2))
    found = torch.func.vmap(gradients, (0, None, None))(qs, k, v)
    for number, one in enumerate(qs):
        expected = exact(name, [one, k, v], do)
        judge([door(one, k, v), *(x[number] for x in found)], expected)


@pytest.mark.parametrize("width", [264, 320, 512])
@pytest.mark.parametrize("name", ["flex_attention", "flash_attn_func", "transformers"])
def test_wide_heads(name: str, width: int, device: torch.device) -> None:
    """Of more than 256 columns, any multiple of 8: gradients are by wgmma, too."""
    tensors = inputs(device, grad=True, width=width)
    with torch.no_grad():
        judge([TRAINED[name](*tensors)], exact(name, tensors))
    assert_ran(gradients=False)
    do = torch.randn_like(tensors[0])
    o = TRAINED[name](*tensors)
    judge([o, *torch.autograd.grad(o, tensors, do)], exact(name, tensors, do))
    assert any(call.prepared_gradients for call in of_hopper())


@pytest.mark.parametrize("name", [*TRAINED, *SERVED])
def test_captured(name: str, device: torch.device) -> None:
    door = (TRAINED | SERVED)[name]
    tensors = inputs(device, grad=False)
    door(*tensors)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = door(*tensors)
    for x in tensors:
        x.copy_(x.flip(0))
    graph.replay()
    judge([o], exact(name, tensors))
    assert_ran(gradients=False)


def test_same_bits(device: torch.device) -> None:
    tensors = inputs(device, grad=True)
    do = torch.randn_like(tensors[0])
    first, *others = (torch.autograd.grad(of_same_bits(*tensors), tensors, do) for _ in range(4))
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_exported_folder(device: torch.device, tmp_path: Path) -> None:
    """In a process without attnc: a forward and gradients, of both ways to sum dq."""
    form = Form(dtype="bfloat16", size=D, size_v=D, causal=True)
    texts = python_files()
    for wanted in (form, replace(form, grads=("q", "k", "v"))):
        texts |= kernel_files(wanted)
    for file, text in texts.items():
        (tmp_path / "exported" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "exported" / file).write_text(text, encoding="utf-8")
    program = f"""
import os, sys
sys.modules["attnc"] = None
import torch, exported
from exported.call import FUNCTIONS, _PREPARED
torch.manual_seed(0)
q = torch.randn(2, 300, 8, {D}, device="cuda").bfloat16().requires_grad_()
k, v = (torch.randn(2, 300, 2, {D}, device="cuda").bfloat16().requires_grad_() for _ in range(2))
turned = [x.transpose(1, 2) for x in (q, k, v)]
right = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
for deterministic in (False, True):
    o = exported.flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
    do = torch.randn_like(o)
    found = [o, *torch.autograd.grad(o, (q, k, v), do)]
    gradients = torch.autograd.grad(right, (q, k, v), do.transpose(1, 2), retain_graph=True)
    expected = [right.transpose(1, 2), *gradients]
    print(max((x.float() - y.float()).abs().max().item() for x, y in zip(found, expected)))
exported.flash_attn_func(q.detach(), k.detach(), v.detach(), causal=True)
names = {{getattr(FUNCTIONS, name).__module__ for name, *_ in _PREPARED.values()}}
print(len(names), all("sm_90a" in name for name in names), flush=True)
os._exit(0)  # or PyTorch's thread for gradients may abort it: that frees tensors while the interpreter ends
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *errors, modules = done.stdout.splitlines()
    assert all(float(error) < 0.1 for error in errors)
    assert modules == "3 True"
