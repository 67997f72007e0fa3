"""flash-attention 3's functions, by the name of its module:

    from attnc.compat.flash_attn_interface import flash_attn_func

Arguments have the positions of flash-attn 3, results its form: `return_attn_probs` returns (o, lse). What
they mean, and what is refused, is as in `attnc.compat.flash_attn`, whose functions these call.
"""

from __future__ import annotations

from typing import Any

import torch

from attnc.api.tensors import FLOATS, GivenTensors, refuse_gradients
from attnc.compat import flash_attn
from attnc.compat.call import Window, unpack_qkv

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Returns o [B, M, H, Dv], with return_attn_probs (o, lse), of `attnc.compat.flash_attn`'s function."""
    return flash_attn.flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, qv=qv, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk, softcap=softcap,
        num_splits=num_splits, pack_gqa=pack_gqa, deterministic=deterministic, sm_margin=sm_margin,
        return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Returns `flash_attn_func` of qkv [B, N, 3, H, D], or of [B, N, num_heads_q + 2 Hkv, D], heads of q, k
    and v one after the other. ValueError where num_heads_q leaves no two equal parts.
    """
    name = "flash_attn_qkvpacked_func"
    given: Any = qkv
    if getattr(given, "ndim", 5) == 4:
        heads = given.shape[2]
        if num_heads_q is None or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
            wanted = f"heads of q that leave as many of k as of v among {heads}"
            raise ValueError(f"{name}: num_heads_q: expected {wanted}, got {num_heads_q}")
        shared = (heads - num_heads_q) // 2
        q, k, v = given.split([num_heads_q, shared, shared], dim=2)
    else:
        q, k, v = unpack_qkv(name, "B N 3 H D", qkv)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
        softcap, deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Returns o [Tq, H, Dv], or with return_attn_probs (o, lse), of `attnc.compat.flash_attn`'s function."""
    return flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q,
        seqused_k=seqused_k, softmax_scale=softmax_scale, causal=causal, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk,
        softcap=softcap, num_splits=num_splits, pack_gqa=pack_gqa, deterministic=deterministic,
        sm_margin=sm_margin, return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Returns o, or with return_softmax_lse (o, lse), of `attnc.compat.flash_attn`'s function of a cache.
    What flash-attn 3 returns behind lse, results of its splits, there is not.
    """
    return flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        rotary_interleaved=rotary_interleaved, num_splits=num_splits, return_softmax_lse=return_softmax_lse,
        page_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q, qv=qv, rotary_seqlens=rotary_seqlens, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
        scheduler_metadata=scheduler_metadata, pack_gqa=pack_gqa, sm_margin=sm_margin,
    )  # fmt: skip


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins attention over parts of the keys: returns (o [B, M, H, D], lse f32[B, M, H]) of out_partial
    [splits, B, M, H, D] and lse_partial f32[splits, B, M, H], natural logarithms; minus infinity is a part
    without a key. For inference: no gradients.

    out: the tensor that o is written to; out_dtype: of o, by default as of out_partial
    Raises TypeError or ValueError with the argument's name.
    """
    name = "flash_attn_combine"
    given = GivenTensors(name)
    given.check("out_partial", out_partial, "splits B M H D", FLOATS)
    given.check("lse_partial", lse_partial, "splits B M H", (torch.float32,))
    given.check_range("out_partial", "splits", 1)
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    if dtype not in FLOATS:
        raise TypeError(f"{name}: out_dtype: expected one of {', '.join(map(str, FLOATS))}, got {dtype}")
    if out is not None:
        given.check("out", out, "B M H D", (dtype,))
    refuse_gradients(name, out_partial=out_partial, lse_partial=lse_partial, out=out)
    lse = lse_partial.logsumexp(0)
    weights = (lse_partial - torch.where(lse.isinf(), 0.0, lse)).exp()[..., None]
    o = torch.where(weights > 0, out_partial * weights, 0.0).sum(0)
    return (o.to(dtype) if out is None else out.copy_(o)), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Returns i32[0], for `scheduler_metadata`: kernels here plan nothing beforehand."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
