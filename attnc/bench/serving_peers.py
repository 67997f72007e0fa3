"""Who takes part in the further cells of decoding: the kernels of attnc/bench/specs/decode, and what of
PyTorch can compute the same. No peer reads pages: each gets the keys in order, in a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnc.bench.decode import PAGE, WIDTH
from attnc.bench.ours import modules_of
from attnc.bench.serving import DRAFTS, HEADS, MLA_SCALE, MLA_VALUE, SUFFIX, Kind, ServingInputs
from attnc.runtime.merge import merge_states
from attnc.runtime.timing import Launch

SPEC = Path(__file__).parent / "specs" / "decode" / "serving.attn"
Make: TypeAlias = Callable[[ServingInputs], Launch]


def _kernel(target: str, name: str) -> Any:
    return getattr(modules_of(SPEC, target)[name], name)


def _generated(target: str, name: str) -> Make:
    def make(x: ServingInputs) -> Launch:
        kernel = _kernel(target, name)
        if name == "mla":  # v is the first columns of k
            return lambda: kernel(x.q, x.k, x.block_table, x.kv_len)
        return lambda: kernel(x.q, x.k, x.v, x.block_table, x.kv_len)

    return make


def _cascade(target: str, x: ServingInputs) -> Launch:
    """The prefix once for all sequences, each one's own keys, and both results joined."""
    shared, own = _kernel(target, "shared"), _kernel(target, "own")
    batch, pages = x.block_table.shape
    prefix = pages - SUFFIX // PAGE
    q = x.q.reshape(1, batch, HEADS, WIDTH)
    table, own_table = x.block_table[:1, :prefix], x.block_table[:, prefix:]
    length, own_length = x.kv_len[:1] - SUFFIX, torch.full_like(x.kv_len, SUFFIX)
    merge = _compiled_merge()

    def launch() -> object:
        o, lse = shared(q, x.k, x.v, table, length)
        own_o, own_lse = own(x.q, x.k, x.v, own_table, own_length)
        return merge(o.reshape(own_o.shape), lse.reshape(own_lse.shape), own_o, own_lse)

    return launch


@cache
def _compiled_merge() -> Any:
    return torch.compile(merge_states, dynamic=False)


def _in_order(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[pages, Hkv, rows, D] as [B, Hkv, N, D]."""
    rows = pages[table.long()].transpose(1, 2)
    return rows.reshape(table.shape[0], pages.shape[1], -1, pages.shape[3])


def _drafts(backend: SDPBackend) -> Make:
    """Every draft sees the keys before its own: the mask is aligned with the last key."""

    def make(x: ServingInputs) -> Launch:
        from torch.nn.attention.bias import causal_lower_right

        q, k, v = x.q.transpose(1, 2), _in_order(x.k, x.block_table), _in_order(x.v, x.block_table)
        mask: Any = causal_lower_right(DRAFTS, k.shape[2])
        if backend is SDPBackend.CUDNN_ATTENTION:
            mask = torch.ones(DRAFTS, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - DRAFTS)

        def launch() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        return launch

    return make


def _compressed(backend: SDPBackend) -> Make:
    def make(x: ServingInputs) -> Launch:
        k = _in_order(x.k.transpose(1, 2), x.block_table)
        q, v = x.q.transpose(1, 2), k[..., :MLA_VALUE]

        def launch() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, scale=MLA_SCALE, enable_gqa=True)

        return launch

    return make


def _products(x: ServingInputs) -> Launch:
    """Two matrix products of cuBLAS and a softmax between them, the scores in memory."""
    k = _in_order(x.k.transpose(1, 2), x.block_table)[:, 0]
    q, v = x.q[:, 0], k[..., :MLA_VALUE]

    def launch() -> torch.Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)) * MLA_SCALE
        return torch.bmm(torch.softmax(scores, -1), v)

    return launch


def _bare_products(x: ServingInputs) -> Launch:
    """The two matrix products alone, by cuBLAS, into tensors that are there."""
    k = _in_order(x.k.transpose(1, 2), x.block_table)[:, 0]
    q, v = x.q[:, 0], k[..., :MLA_VALUE]
    scores = torch.empty(*q.shape[:2], k.shape[1], dtype=q.dtype, device=q.device)
    o = torch.empty_like(q[..., :MLA_VALUE])

    def launch() -> torch.Tensor:
        torch.bmm(q, k.transpose(1, 2), out=scores)
        return torch.bmm(scores, v, out=o)

    return launch


#: Those that take part where they are named.
PEERS = ("cudnn", "fa2", "triton")


def contenders(kind: Kind, target: str) -> Mapping[str, Make]:
    """Who takes part in a kind of cell; the first is the one that others are compared with."""
    beside = {} if target == "triton" or kind == "prefix" else {"triton": _generated("triton", kind)}
    match kind:
        case "mla":
            return {
                "attnc": _generated(target, "mla"),
                **beside,
                "cudnn": _compressed(SDPBackend.CUDNN_ATTENTION),
                "fa2": _compressed(SDPBackend.FLASH_ATTENTION),
                "products": _products,
                "bare": _bare_products,
            }
        case "verify":
            return {
                "attnc": _generated(target, "verify"),
                **beside,
                "cudnn": _drafts(SDPBackend.CUDNN_ATTENTION),
                "fa2": _drafts(SDPBackend.FLASH_ATTENTION),
            }
        case "prefix":
            return {"cascade": partial(_cascade, target), "plain": _generated(target, "own")}
