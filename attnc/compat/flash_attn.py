"""flash-attention's functions: `from attnc.compat.flash_attn import flash_attn_func`.

Arguments have the order of flash-attn 2; those that only flash-attn 3 or an engine's copy has are keywords.
Meaning as there: masks are aligned at the last key, -1 is no bound of a window, rows that see no key are 0.
Their lse is minus infinity, as in flash-attn 3. What is not supported raises ValueError with the name of the
argument; docs/compat.md lists all of them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from attnc.api.fastest import class_of_length
from attnc.api.repeats import are_left_out, repeat
from attnc.compat.call import (
    DENSE,
    FEW_KEYS,
    PACKED,
    PAGED,
    Call,
    Window,
    check,
    draw_seed_for,
    one_of,
    one_sink,
    refuse,
    unpack_kv,
    unpack_qkv,
)
from attnc.compat.kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

#: A tensor, or a tuple of them if asked for.
Result: TypeAlias = Any


#: Tensors of a packed call that its kernel may take, by its names for them.
_PACKED = (
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table", "alibi_slopes",
    "s_aux", "seed",
)  # fmt: skip


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    return_lse: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    ver: int = 0,
    fa_version: int = 0,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    gather_kv_indices: torch.Tensor | None = None,
) -> Result:
    """Returns o [B, M, H, Dv] of q [B, M, H, D], k [B, N, Hkv, D] and v [B, N, Hkv, Dv], all of float16,
    bfloat16 or float32. Gradients flow to q, k and v.

    softmax_scale: 1 / sqrt(D) if None
    window_size: (left, right), keys before and after the query's position; -1 for no bound
    softcap: 0 for none; alibi_slopes: f32[H] or f32[B, H]
    s_aux, learnable_sink or sinks: [H], a logit for each head, which is added to the softmax's denominator
    return_lse, return_softmax_lse: returns (o, lse), with lse f32[B, H, M], natural logarithm
    return_attn_probs: returns (o, lse, an empty tensor): probabilities are never in memory
    out: the tensor that o is written to, without gradients
    deterministic: whether gradients have the same bits in every run. Without it dq is added in any order
        where that is faster, unless `torch.use_deterministic_algorithms` is on
    block_sparse_tensors: the lists of flash-attn 4, for each block of queries: `mask_block_cnt`
        i32[B or 1, H or 1, R], `mask_block_idx` i32[..., S], the same of `full_block_*` or None, and
        `block_size`, (128, 128) if None. Keys in no listed block are hidden. Lists for gradients are made
        from them. The mods of flash-attn 4 are refused; `attnc.flex` takes those of FlexAttention
    num_splits, pack_gqa, sm_margin, ver, fa_version: taken, without an effect on results

    Raises TypeError or ValueError with the name of the argument.
    """
    name = "flash_attn_func"
    key = None
    sink = one_sink(name, s_aux, learnable_sink, sinks)
    others = (qv, q_descale, k_descale, v_descale, out)
    mods = (score_mod, score_mod_bwd, mask_mod, aux_tensors, gather_kv_indices)
    seed = draw_seed_for(dropout_p, q)
    if not attention_chunk and are_left_out(*others, *mods, block_sparse_tensors):
        facts = (name, softmax_scale, causal, window_size, softcap, deterministic, dropout_p)
        key, found = repeat(facts, (q, k, v, alibi_slopes, sink, seed))
        if found is not None:
            ((o, lse),) = found
            wants_lse = return_lse or return_softmax_lse
            return _arrange_results(o, lse, return_attn_probs, wants_lse, dropout_p, name)
    refuse(name, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(name, attention_chunk=attention_chunk, score_mod=score_mod, score_mod_bwd=score_mod_bwd)
    refuse(name, mask_mod=mask_mod, aux_tensors=aux_tensors, gather_kv_indices=gather_kv_indices)
    call = Call(name, q, k, v, check(name, DENSE, q=q, k=k, v=v))
    call.score(softmax_scale, softcap, alibi_slopes, sink)
    call.mask(causal, window_size)
    call.drop(dropout_p, seed)
    call.hurry(deterministic)
    if block_sparse_tensors is not None:
        call.list_blocks(block_sparse_tensors)
    given = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "s_aux": sink, "seed": seed}
    o, lse = call.run(out=out, key=key, given=given)
    return _arrange_results(o, lse, return_attn_probs, return_lse or return_softmax_lse, dropout_p, name)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    page_table: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    return_lse: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    scheduler_metadata: torch.Tensor | None = None,
    ver: int = 0,
    fa_version: int = 0,
) -> Result:
    """Returns o [Tq, H, Dv] of q [Tq, H, D], k [Tk, Hkv, D] and v [Tk, Hkv, Dv], with sequences end to end.

    cu_seqlens_q, cu_seqlens_k: i32[B + 1], where sequences begin, and the end of the last one
    seqused_q, seqused_k: i32[B], how many rows of each sequence count
    block_table, page_table: i32[B, P], of k and v in pages [pages, page, Hkv, D]. A sequence then has
        seqused_k keys, or those between two entries of cu_seqlens_k
    max_seqlen_q: 1 chooses the kernels for decoding, up to 1,024 those whose tiles have rows of several
        heads, right for any number of queries; kernels read lengths themselves. max_seqlen_k: up to 1,024,
        gradients have the same bits in every run, as that is faster
    num_splits, pack_gqa, sm_margin, scheduler_metadata, ver, fa_version: taken, without an effect on results

    lse is f32[H, Tq]. Other arguments, results and errors are as of `flash_attn_func`.
    """
    name = "flash_attn_varlen_func"
    known = block_table if page_table is None else page_table
    sink = one_sink(name, s_aux, learnable_sink, sinks)
    seed = draw_seed_for(dropout_p, q)
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, known, alibi_slopes, sink, seed)
    key = None
    others = (qv, q_descale, k_descale, v_descale, out)
    is_one_table = block_table is None or page_table is None
    # which gradients of short sequences have, as that is faster
    has_same_bits = deterministic or (isinstance(max_seqlen_k, int) and max_seqlen_k <= FEW_KEYS)
    length = class_of_length(max_seqlen_q)
    if not attention_chunk and is_one_table and are_left_out(*others):
        facts = (
            name, softmax_scale, causal, window_size, softcap, deterministic, has_same_bits, dropout_p,
            length,
        )  # fmt: skip
        key, found = repeat(facts, given)
        if found is not None:
            ((o, lse),) = found
            wants_lse = return_lse or return_softmax_lse
            return _arrange_results(o, lse, return_attn_probs, wants_lse, dropout_p, name)
    refuse(name, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(name, attention_chunk=attention_chunk)
    table = one_of(name, block_table=block_table, page_table=page_table)
    if cu_seqlens_k is None and (table is None or seqused_k is None):
        raise ValueError(f"{name}: cu_seqlens_k: expected a tensor, or seqused_k with block_table, got None")
    checked = check(name, PACKED if table is None else PAGED, q=q, k=k, v=v)
    if table is not None:
        checked.check("page_table" if block_table is None else "block_table", table, "B _", (torch.int32,))
    call = Call(name, q, k, v, checked)
    call.set_ragged(cu_seqlens_q, seqused_q, most=max_seqlen_q)
    if table is not None:
        call.set_paged(table)
        call.length("seqused_k" if seqused_k is not None else "cu_seqlens_k", _first(seqused_k, cu_seqlens_k))
    else:
        call.set_packed(cu_seqlens_k)
        if seqused_k is not None:
            call.length("seqused_k", seqused_k)
    call.score(softmax_scale, softcap, alibi_slopes, sink)
    call.mask(causal, window_size)
    call.drop(dropout_p, seed)
    if deterministic and (call.wants_gradient(sink) or call.wants_gradient(alibi_slopes)):
        raise ValueError(
            f"{name}: deterministic: expected False, as gradients of s_aux and alibi_slopes of packed"
            " sequences are added in any order, got True"
        )
    call.hurry(has_same_bits)
    o, lse = call.run(out=out, key=key, given=dict(zip(_PACKED, given, strict=True)))
    return _arrange_results(o, lse, return_attn_probs, return_lse or return_softmax_lse, dropout_p, name)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *arguments: Any, **options: Any) -> Result:
    """Returns `flash_attn_func` of qkv [B, N, 3, H, D]; further arguments as there."""
    q, k, v = unpack_qkv("flash_attn_qkvpacked_func", "B N 3 H D", qkv)
    return flash_attn_func(q, k, v, *arguments, **options)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *arguments: Any, **options: Any) -> Result:
    """Returns `flash_attn_func` of q and kv [B, N, 2, Hkv, D]; further arguments as there."""
    k, v = unpack_kv("flash_attn_kvpacked_func", ("B M H D", "B N 2 Hkv D"), q, kv)
    return flash_attn_func(q, k, v, *arguments, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *arguments: Any, **options: Any
) -> Result:
    """Returns `flash_attn_varlen_func` of qkv [T, 3, H, D]; further arguments as there, from dropout_p on."""
    q, k, v = unpack_qkv("flash_attn_varlen_qkvpacked_func", "T 3 H D", qkv)
    shared: tuple[Any, ...] = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *shared, *arguments, **options)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *arguments: Any, **options: Any
) -> Result:
    """Returns `flash_attn_varlen_func` of q and kv [Tk, 2, Hkv, D]; further arguments as there."""
    k, v = unpack_kv("flash_attn_varlen_kvpacked_func", ("T H D", "S 2 Hkv D"), q, kv)
    return flash_attn_varlen_func(q, k, v, *arguments, **options)


def _arrange_results(
    o: torch.Tensor, lse: torch.Tensor, probs: bool, wants_lse: bool, dropout_p: float, name: str
) -> Result:
    if probs and dropout_p:
        raise ValueError(
            f"{name}: return_attn_probs: expected False with dropout, as none are kept, got True"
        )
    if probs:
        return o, lse, o.new_empty(0)
    return (o, lse) if wants_lse else o


def _first(*tensors: torch.Tensor | None) -> torch.Tensor:
    return next(x for x in tensors if x is not None)
