"""vLLM's `unified_attention` (of vllm/v1/attention/ops/triton_unified_attention.py): prefill, decode and any
mixture of both against a paged cache, with its argument list. vLLM itself is not imported.

    from attnc.adapters.vllm import unified_attention
"""

from __future__ import annotations

from functools import lru_cache

import torch

from attnc.adapters.specs import Kernel, Wanted, dtype_of, kernel, refuse


def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: torch.Tensor | None = None,
    softmax_segm_max: torch.Tensor | None = None,
    softmax_segm_expsum: torch.Tensor | None = None,
    *,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **unsupported: object,
) -> None:
    """Writes the attention of every token to `out`.

    q, out: [T, Hq, D]; k, v: [num_blocks, block_size, Hkv, D], any strides but a contiguous last axis
    cu_seqlens_q: i32[B + 1]; seqused_k: i32[B], with the new tokens; block_table: i32[B, P]
    softmax_scale, window_size (left, right; -1 for none), softcap (0 for none): part of the kernel, so a new
    value of one compiles once. alibi_slopes, sinks: [Hq], or None.
    max_seqlen_k, seq_threshold_3D and what follows it steer vLLM's own kernels, and k_descale and v_descale
    apply to quantised caches, which are refused. unsupported: taken as long as it asks for nothing.

    With max_seqlen_q = 1 and as many tokens as sequences, token b is that of sequence b (sequences without a
    token, as graphs are padded with, come last), and the keys of a sequence are split among programs.

    ValueError or TypeError names the argument, what was expected and what came. Never waits for the device.
    """
    refuse("unified_attention", q_descale=q_descale, **unsupported)
    decode = max_seqlen_q == 1 and len(q) == len(seqused_k)
    by_head = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    vectors = {name: x.float() for name, x in by_head.items() if x is not None}
    made = _kernel(
        _dtype(q, k, v),
        q.shape[-1],
        k.shape[1],
        float(softmax_scale),
        _left(causal, window_size),
        float(softcap or 0.0),
        frozenset(vectors),
        decode,
    )
    tables = (block_table, seqused_k, *vectors.values())
    if decode:
        made(q.unsqueeze(1), k, v, *tables, out=out.unsqueeze(1))
    else:
        made(q, k, v, cu_seqlens_q, *tables, out=out)


def _dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.dtype:
    """That of q and the cache. TypeError where the cache has another."""
    dtype = dtype_of("q", q)
    for name, cache in (("k", k), ("v", v)):
        if cache.dtype != dtype:
            raise TypeError(
                f"{name}: expected dtype {dtype}, like q, got {cache.dtype}: quantised caches and"
                f" {name}_descale are not supported"
            )
    return dtype


def _left(causal: bool, window_size: tuple[int, int]) -> int:
    """Keys before a query. ValueError where it sees some behind it."""
    if not causal:
        raise ValueError(f"unified_attention: causal: expected True, got {causal!r}")
    left, right = window_size
    if right > 0:
        raise ValueError(f"window_size: expected at most 0 keys on the right, got {right}")
    return left


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
