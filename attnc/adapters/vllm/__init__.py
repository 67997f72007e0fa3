"""vLLM: its attention function, and a plug-in with an attention backend.

    from attnc.adapters.vllm import unified_attention        # vLLM's argument list; vLLM is not imported
    vllm serve MODEL --attention-backend CUSTOM              # the plug-in, where attnc is installed
    vllm serve MODEL --attention-backend ATTNC_MLA           # for latent attention
    vllm serve MODEL --attention-backend ATTNC_MLA_SPARSE    # for that of selected tokens (DSA)

`unified_attention` is that of vllm/v1/attention/ops/triton_unified_attention.py: prefill, decode and any
mixture of both against a paged cache. `register` is the entry point of vLLM's group `vllm.general_plugins`,
which it calls in each of its processes; `backend`, `mla` and `sparse`, which it names, and `latent`, which
both of these have, are the only modules here that import vLLM.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import index
from typing import Any

import torch

from attnc.adapters.pages import attend, uniform
from attnc.adapters.specs import number_of, refuse

# --- the attention function ---------------------------------------------------------------------------------


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
    k_descale: torch.Tensor | float | None,
    v_descale: torch.Tensor | float | None,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: torch.Tensor | None = None,
    softmax_segm_max: torch.Tensor | None = None,
    softmax_segm_expsum: torch.Tensor | None = None,
    *,
    alibi_slopes: torch.Tensor | None = None,
    qq_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_quant_mode: int = 0,
    chunk_lookback: int = -1,
    use_td: bool = False,
    mm_prefix_clamp_sliding_window: bool = False,
    order: int = 0,
    are_uniform: bool = False,
    **unsupported: object,
) -> None:
    """Writes the attention of every token to `out`.

    q: [T, Hq, D]; out: [T, Hq, Dv]
    k: [num_blocks, block_size, Hkv, D]; v: [num_blocks, block_size, Hkv, Dv], any strides but a contiguous
        last axis; all of float16, bfloat16 or float32, or k and v of float8_e4m3fn, float8_e5m2 or int8
        beside 16 bits
    k_descale, v_descale: what k and v of 8 bits are multiplied by, f32 that expands to [B, Hkv], a number or
        None; other caches are taken as they are, whatever their scales, as vLLM's kernels do
    cu_seqlens_q: i32[B + 1]; seqused_k: i32[B], with the new tokens; block_table: i32[B, P]
    causal: True, or False for tokens that see all keys of their sequence, without a window
    softmax_scale, window_size (left, right; -1 for none), softcap (0 for none): part of the kernel, so a new
    value of one compiles once. alibi_slopes, sinks: [Hq], or None.
    qq_bias: [X, X], or [B, X, X] of each sequence, added to the scores of new tokens with each other, for
    trees of drafts, or None; minus infinity hides, and the mask is causal beside it.
    order: keys of a segment, in which sums are formed, so that a token has the same bits in every call; 0:
    sums come in any order.
    are_uniform: promises that these sequences have max_seqlen_q tokens each and those without any come last,
    as in vLLM's own steps, which kernels for tokens that follow each other are faster with.
    kv_quant_mode: vLLM's number of 8 bits by a scale of a tensor, or of none; chunk_lookback: -1.
    max_seqlen_k, use_td, seq_threshold_3D and what follows it steer vLLM's own kernels, and
    mm_prefix_clamp_sliding_window ranges that are refused. unsupported: taken as long as it asks for nothing.

    Where max_seqlen_q tokens, at most 16, of every sequence are as many as q has, the keys of a sequence are
    split among programs; sequences may have fewer, in any order, and rows behind the last one be padding.

    Raises ValueError or TypeError that names the argument, what was expected and what came. Never waits for
    the device.
    """
    refuse("unified_attention", q_descale=q_descale, **unsupported)
    if chunk_lookback != -1:
        raise ValueError(f"unified_attention: chunk_lookback: expected -1, got {chunk_lookback!r}")
    if kv_quant_mode not in (0, _BY_TENSOR):
        raise ValueError(
            f"unified_attention: kv_quant_mode: expected 0 or {_BY_TENSOR}, got {kv_quant_mode!r}"
        )
    for name, x in (("v", v), ("cu_seqlens_q", cu_seqlens_q)):
        if not isinstance(x, torch.Tensor):  # `attend` takes calls without them too
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    tokens = _count_tokens(q, max_seqlen_q, seqused_k)
    attend(
        q,
        k,
        v,
        out,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        block_table=block_table,
        scale=number_of("softmax_scale", softmax_scale),
        left=_count_keys_before(causal, window_size),
        causal=causal,
        softcap=number_of("softcap", softcap, 0.0),
        by_head={"alibi_slopes": alibi_slopes, "sinks": sinks},
        tokens=tokens if are_uniform else 0,
        few=tokens > 0,
        qq_bias=qq_bias,
        k_descale=k_descale,
        v_descale=v_descale,
        order=order,
    )


#: vLLM's KVQuantMode.FP8_PER_TENSOR.
_BY_TENSOR = 1


def unified_attention_diffkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    max_seqlen_q: int = 1,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    use_alibi_sqrt: bool = False,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: torch.Tensor | None = None,
    softmax_segm_max: torch.Tensor | None = None,
    softmax_segm_expsum: torch.Tensor | None = None,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    q_descale: torch.Tensor | None = None,
) -> None:
    """`unified_attention` with the argument list of vllm/v1/attention/ops/triton_unified_attention_diffkv.py,
    whose values have another width than keys.
    """
    unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, 0, softmax_scale, causal, window_size,
        block_table, softcap, q_descale, k_descale, v_descale, alibi_slopes=alibi_slopes, sinks=sinks,
        use_alibi_sqrt=use_alibi_sqrt,
    )  # fmt: skip


def _count_tokens(q: torch.Tensor, most: int, lengths: torch.Tensor) -> int:
    """Returns the new tokens of each sequence where these are as many, and few; else 0, as for arguments that
    `attend` refuses.
    """
    try:
        return uniform(len(q), most, len(lengths))
    except (TypeError, RuntimeError):
        return 0


def _count_keys_before(causal: bool, window_size: tuple[int, int]) -> int:
    """Returns how many keys before its own a query sees. ValueError where it sees some behind it."""
    if not isinstance(causal, bool):
        raise ValueError(f"unified_attention: causal: expected True or False, got {causal!r}")
    try:
        left, right = map(index, window_size)
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size: expected (left, right), integers, -1 for none, got {window_size!r}"
        ) from None
    if right > 0:
        raise ValueError(f"window_size: expected at most 0 keys on the right, got {right}")
    if not causal and (left, right) != (-1, -1):
        raise ValueError(f"window_size: expected (-1, -1), as causal is False, got {window_size!r}")
    return left


# --- the plug-in --------------------------------------------------------------------------------------------


BACKEND = "attnc.adapters.vllm.backend.AttncBackend"
LATENT_BACKEND = "attnc.adapters.vllm.mla.AttncMLABackend"
SPARSE_BACKEND = "attnc.adapters.vllm.sparse.AttncSparseMLABackend"
PREFILL_BACKEND = "attnc.adapters.vllm.mla.AttncMLAPrefill"


def register() -> None:
    """Offers the backends: `--attention-backend CUSTOM` takes that of ordinary attention, `ATTNC_MLA` that of
    latent attention, `ATTNC_MLA_SPARSE` that of latent attention over selected tokens,
    `--attention-config.mla_prefill_backend CUSTOM` that of prompts of latent attention. Called any number of
    times in a process.

    Where another plug-in has the name CUSTOM already, it keeps it, and a warning says so.
    """
    from vllm.v1.attention.backends.mla.prefill.registry import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _offer(AttentionBackendEnum.CUSTOM, BACKEND, register_backend)
    _offer(MLAPrefillBackendEnum.CUSTOM, PREFILL_BACKEND, register_mla_prefill_backend)
    latent_backend()
    sparse_backend()


def latent_backend() -> Any:
    """Returns ATTNC_MLA, a member of vLLM's enumeration that is made once in a process.

    A process that is sent it, in a configuration, may not have loaded plug-ins yet: it is pickled as a call
    of this.
    """
    return _add("ATTNC_MLA", LATENT_BACKEND, latent_backend)


def sparse_backend() -> Any:
    """Returns ATTNC_MLA_SPARSE, likewise."""
    return _add("ATTNC_MLA_SPARSE", SPARSE_BACKEND, sparse_backend)


def _add(name: str, path: str, again: Callable[[], Any]) -> Any:
    """Returns a member of the enumeration. again: what finds it in another process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if name not in AttentionBackendEnum.__members__:
        register_backend(name, path)
        AttentionBackendEnum[name].__reduce_ex__ = lambda protocol: (again, ())
    return AttentionBackendEnum[name]


def _offer(custom: Any, path: str, register_as: Callable[[Any, str], Any]) -> None:
    if custom.is_overridden() and custom.get_path() != path:
        warnings.warn(
            f"attnc is not offered to vLLM: CUSTOM is {custom.get_path()} already; VLLM_PLUGINS=attnc"
            " loads this plug-in alone",
            stacklevel=3,
        )
        return
    register_as(custom, path)
