"""The functions that programs call, on inputs so small that the GPU is never waited for: what stands before a
launch of attnc, whose kernels a call takes.
"""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import attnc
from attnc.adapters.flashinfer import BatchDecodeWithPagedKVCacheWrapper
from attnc.adapters.pages import attend
from attnc.adapters.transformers import attention
from attnc.compat.export import kernel_files, python_files
from attnc.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from attnc.compat.form import Form
from attnc.flex import flex_attention
from attnc.paging import PagedCache, Step

_WIDTH, _PAGE = 64, 16
#: Of the page manager: how many sequences have a token each, and tokens after which they begin anew.
_SEQUENCES, _LONGEST = (1, 64), 4096
_SPEC = """
attention compiled {
  input q: bf16[B, M, Hkv * G, 64]
  input k, v: bf16[B, N, Hkv, 64]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 64]
  grad q, k, v
}
"""


#: Names of `trained_functions`, whose kernels processes of their own compile before the calls are timed.
FUNCTIONS = (
    "attnc.compile", "flex_attention", "flash_attn_func", "flash_attn_varlen_func",
    "attention of transformers", "flash_attn_func, exported",
)  # fmt: skip


class Trained(NamedTuple):
    """A function of q, k and v that has gradients. lay: how tensors [B, N, H, D] lie in what it takes."""

    function: Callable[..., Any]
    lay: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


def trained_functions(sizes: Mapping[str, int], device: str) -> dict[str, Trained]:
    """Returns functions that have gradients, by name. sizes: B, H, Hkv and N of what they are called with."""
    batch, length = sizes["B"], sizes["N"]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    packed = partial(
        flash_attn_varlen_func, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=length,
        max_seqlen_k=length, causal=True,
    )  # fmt: skip
    module = torch.nn.Module()

    def encode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(module, q, k, v, None, is_causal=False)[0]

    return {
        "attnc.compile": Trained(attnc.compile(_SPEC)),
        "flex_attention": Trained(partial(flex_attention, mask_mod=_causal, enable_gqa=True), _heads_first),
        "flash_attn_func": Trained(partial(flash_attn_func, causal=True)),
        "flash_attn_varlen_func": Trained(packed, lambda x: x.flatten(0, 1)),
        "attention of transformers": Trained(encode, _heads_first),
        "flash_attn_func, exported": Trained(partial(_import_exported().flash_attn_func, causal=True)),
    }


@functools.cache
def _import_exported() -> Any:
    """Imports a folder as `attnc export` writes it, with the kernels that are timed. It stays for as long as
    the process lives, since they are imported at their first call.
    """
    form = Form(dtype="bfloat16", size=_WIDTH, size_v=_WIDTH, causal=True)
    texts = python_files() | kernel_files(form) | kernel_files(replace(form, grads=("q", "k", "v")))
    folder = tempfile.TemporaryDirectory()
    _KEPT.append(folder)
    for name, text in texts.items():
        path = Path(folder.name) / _EXPORTED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    sys.path.insert(0, folder.name)
    try:
        return importlib.import_module(_EXPORTED)
    finally:
        sys.path.remove(folder.name)


_EXPORTED = "attnc_bench_exported"
_KEPT: list[Any] = []


def packed_by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int
) -> Any:
    """Calls PyTorch's `varlen_attn`, causal."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


def draw_trained(sizes: Mapping[str, int], device: str) -> Sequence[torch.Tensor]:
    """Returns q, k and v for `trained_functions`, [B, N, H, D]."""
    batch, length = sizes["B"], sizes["N"]
    heads = (sizes["H"], sizes["Hkv"], sizes["Hkv"])
    return [torch.randn(batch, length, count, _WIDTH, device=device).bfloat16() for count in heads]


def served_functions(sizes: Mapping[str, int], device: str) -> dict[str, Callable[[], Any]]:
    """Returns calls against pages, of one token and of a prompt, and the page manager's steps, by name."""
    batch, pages = sizes["B"], -(-sizes["N"] // _PAGE)
    q, *_ = draw_trained(sizes, device)
    shape = (batch * pages, _PAGE, sizes["Hkv"], _WIDTH)
    k, v = torch.randn(2, *shape, device=device).bfloat16().unbind()
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    lengths = torch.full((batch,), sizes["N"], dtype=torch.int32, device=device)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
    token = q[:, :1].contiguous()
    common: dict[str, Any] = {
        "seqused_k": lengths, "block_table": table, "scale": _WIDTH**-0.5, "left": -1, "softcap": 0.0,
        "by_head": {},
    }  # fmt: skip

    def serve(new: torch.Tensor, tokens: int) -> Callable[[], Any]:
        flat, starts = new.flatten(0, 1), ends * new.shape[1]
        out = torch.empty_like(flat)  # engines have it
        return partial(attend, flat, k, v, out, cu_seqlens_q=starts, tokens=tokens, **common)

    decode = partial(
        flash_attn_with_kvcache, token, k, v, cache_seqlens=lengths, block_table=table, causal=True
    )
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device=device))
    last = torch.full((batch,), sizes["N"] - (pages - 1) * _PAGE, dtype=torch.int32)
    wrapper.plan(
        pages * ends.cpu(), table.flatten().cpu(), last, sizes["H"], sizes["Hkv"], _WIDTH, _PAGE,
        q_data_type=q.dtype,
    )  # fmt: skip
    return {
        "flash_attn_with_kvcache, one token": decode,
        "FlashInfer's wrapper, one token": partial(wrapper.run, token.flatten(0, 1), (k, v)),
        "vLLM and SGLang, one token": serve(token, 1),
        "vLLM and SGLang, a prompt": serve(q, 0),
        **{f"PagedCache.append, a token of {count}": _make_steps(count, device) for count in _SEQUENCES},
    }


def _make_steps(sequences: int, device: str) -> Callable[[], Any]:
    cache = PagedCache(
        pages=sequences * _LONGEST // _PAGE,
        page=_PAGE,
        kv_heads=1,
        head_dim=8,
        sequences=sequences,
        max_length=_LONGEST,
        device=device,
    )
    numbers = [cache.allocate() for _ in range(sequences)]

    def step() -> Step:
        if cache.length(numbers[0]) == _LONGEST:
            for number in numbers:
                cache.truncate(number, 0)
        return cache.append(numbers)

    return step


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx
