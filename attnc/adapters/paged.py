"""Attention of new tokens against pages, as serving engines want it: prompts, chunks and single tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from attnc.adapters.specs import Kernel, Wanted, dtype_of, kernel


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    left: int,
    softcap: float,
    by_head: Mapping[str, torch.Tensor | None],
    decode: bool,
) -> None:
    """Writes the attention of every token to `out`: causal, a sequence's last token at its last key.

    q, out: [T, Hq, D]; k, v: [pages, page, Hkv, D], any strides but a contiguous last axis
    cu_seqlens_q: i32[B + 1]; seqused_k: i32[B], keys with those of the new tokens; block_table: i32[B, P]
    left: keys before a query that it sees, -1 for all; softcap: 0 for none
    by_head: "alibi_slopes" and "sinks", f32[Hq] or None
    decode: token b is that of sequence b, and the keys of a sequence are split among programs

    scale, left and softcap are part of the kernel, so a new value of one compiles once. ValueError or
    TypeError names the argument, what was expected and what came. Never waits for the device.
    """
    vectors = {name: x.float() for name, x in by_head.items() if x is not None}
    made = _kernel(
        _dtype(q, k, v),
        q.shape[-1],
        k.shape[1],
        float(scale),
        left,
        float(softcap),
        frozenset(vectors),
        decode,
    )
    tables = (block_table, seqused_k, *vectors.values())
    if decode:
        made(q.unsqueeze(1), k, v, *tables, out=out.unsqueeze(1))
    else:
        made(q, k, v, cu_seqlens_q, *tables, out=out)


def _dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.dtype:
    """Returns the element type of q and of the cache. TypeError where they differ."""
    dtype = dtype_of("q", q)
    for name, cache in (("k", k), ("v", v)):
        if cache.dtype != dtype:
            raise TypeError(
                f"{name}: expected dtype {dtype}, like q, got {cache.dtype}: quantised caches and"
                f" {name}_descale are not supported"
            )
    return dtype


@lru_cache(maxsize=256)
def _kernel(
    dtype: torch.dtype,
    head_dim: int,
    page: int,
    scale: float,
    left: int,
    softcap: float,
    vectors: frozenset[str],
    decode: bool,
) -> Kernel:
    """Inputs are named like the arguments: what a kernel refuses, the caller knows by that name."""
    queries = "[B, M, Hkv * G, D]" if decode else "[T, Hkv * G, D]"
    return kernel(
        Wanted(
            name="unified_attention",
            dtype=dtype,
            head_dim=head_dim,
            scale=scale,
            q=queries if decode else f"{queries} via ragged(cu_seqlens_q)",
            kv=f"[B, N, Hkv, D] via paged(block_table, page = {page})",
            o=queries,
            inputs=(
                *(() if decode else ("cu_seqlens_q: i32[B + 1]",)),
                "block_table: i32[B, P]",
                "seqused_k: i32[B]",
            ),
            length="seqused_k",
            mask="causal" if left < 0 else f"window({left}, 0)",
            softcap=softcap,
            slopes="alibi_slopes" if "alibi_slopes" in vectors else "",
            sink="sinks" if "sinks" in vectors else "",
            decode=decode,
        )
    )
