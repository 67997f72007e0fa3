"""flash-attention's functions: `from attnc.compat.flash_attn import flash_attn_func`.

Arguments have the order of flash-attn 2; those that only flash-attn 3 or an engine's copy has are keywords.
Meaning as there: masks are aligned at the last key, -1 is no bound of a window, rows that see no key are 0.
Their lse is minus infinity, as in flash-attn 3. What is not supported raises ValueError with the name of the
argument; docs/compat.md lists all of them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from attnc.compat.call import Call, Window, check, one_of, refuse, unpacked


def append(
    cache: torch.Tensor,
    new: torch.Tensor,
    lengths: torch.Tensor,
    *,
    table: torch.Tensor | None = None,
    batch: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> None:
    """Writes rows `new` behind the first `lengths[b]` rows of sequence b.

    cache: [B, capacity, H, D], or with a table [pages, page, H, D], where row i of sequence b is row
        i % page of page table[b, i // page]; batch: i32[B], which row of a plain cache is sequence b
    new: [B, rows, H, D], or with starts: i32[B + 1] the sequences end to end, [total, H, D]
    """
    with torch.no_grad():
        if starts is None:
            count, rows = new.shape[:2]
            sequences = torch.arange(count, device=new.device).repeat_interleave(rows)
            at = torch.arange(rows, device=new.device).repeat(count)
            new = new.flatten(0, 1)
        else:
            tokens = torch.arange(len(new), device=new.device)
            sequences = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
            at = tokens - starts[sequences]
        at = lengths[sequences] + at
        if table is not None:
            page = cache.shape[1]
            cache[table[sequences, at // page].long(), at % page] = new
        else:
            cache[sequences if batch is None else batch[sequences].long(), at] = new


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
) -> Result:
    """Returns o [B, M, H, Dv] of q [B, M, H, D], k [B, N, Hkv, D] and v [B, N, Hkv, Dv], all of float16,
    bfloat16 or float32; differentiable in them.

    softmax_scale: 1 / sqrt(D) if None; window_size: (left, right), -1 for no bound; softcap: 0 for none.
    alibi_slopes: f32[H] or f32[B, H]; s_aux, learnable_sink or sinks: [H], a logit for each head that joins
    the denominator. return_lse, or return_softmax_lse: (o, lse f32[B, H, M], natural logarithm);
    return_attn_probs: (o, lse, an empty tensor), as probabilities are never kept. out: where o goes, without
    gradients. deterministic: gradients are the same bits in every run; without, dq may be added in any order
    where that is faster, unless `torch.use_deterministic_algorithms` is on. num_splits, pack_gqa, sm_margin,
    ver, fa_version: results are the same bits whatever they say. Raises TypeError or ValueError with the name
    of an argument.
    """
    name = "flash_attn_func"
    refuse(name, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(name, attention_chunk=attention_chunk)
    call = Call(name, q, k, v)
    sink = one_of(name, s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)
    call.score(softmax_scale, softcap, alibi_slopes, sink)
    call.mask(causal, window_size)
    call.drop(dropout_p)
    call.hurry(deterministic)
    o, lse = call.run(out=out)
    return _returned(o, lse, return_attn_probs, return_lse or return_softmax_lse, dropout_p, name)


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
    """Returns o [Tq, H, Dv] of q [Tq, H, D], k [Tk, Hkv, D] and v [Tk, Hkv, Dv], sequences end to end.

    cu_seqlens_q, cu_seqlens_k: i32[B + 1]; seqused_q, seqused_k: i32[B], rows of each that count.
    block_table, or page_table: i32[B, P], then k and v are [pages, page, Hkv, D] and their lengths seqused_k
    or the differences of cu_seqlens_k. lse is f32[H, Tq]. The rest as in `flash_attn_func`.
    max_seqlen_q: 1 is a promise that makes decoding fast; otherwise kernels find it, and max_seqlen_k, by
    themselves. num_splits, pack_gqa, sm_margin, scheduler_metadata, ver and fa_version are hints that are not
    needed.
    """
    name = "flash_attn_varlen_func"
    refuse(name, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(name, attention_chunk=attention_chunk)
    table = one_of(name, block_table=block_table, page_table=page_table)
    sink = one_of(name, s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)
    if cu_seqlens_k is None and (table is None or seqused_k is None):
        raise ValueError(f"{name}: cu_seqlens_k: expected a tensor, or seqused_k with block_table, got None")
    single = table is not None and max_seqlen_q == 1 and len(q) == len(table) and seqused_q is None
    call = Call(name, q.unsqueeze(1) if single else q, k, v)
    call.score(softmax_scale, softcap, alibi_slopes, sink)
    call.mask(causal, window_size)
    call.drop(dropout_p)
    if not single:
        call.ragged(cu_seqlens_q, seqused_q)
    if table is not None:
        call.paged(table)
        call.length("seqused_k" if seqused_k is not None else "cu_seqlens_k", _first(seqused_k, cu_seqlens_k))
    else:
        call.packed(cu_seqlens_k)
        if seqused_k is not None:
            call.length("seqused_k", seqused_k)
    if deterministic and (call.wants_gradient(sink) or call.wants_gradient(alibi_slopes)):
        raise ValueError(
            f"{name}: deterministic: expected False, as gradients of s_aux and alibi_slopes of packed"
            " sequences are added in any order, got True"
        )
    o, lse = call.run(out=out.unsqueeze(1) if single and out is not None else out)
    if single:
        o, lse = o.squeeze(1), lse.squeeze(2).mT.contiguous()
    return _returned(o, lse, return_attn_probs, return_lse or return_softmax_lse, dropout_p, name)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int | None = 0,
    scheduler_metadata: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    ver: int = 0,
    fa_version: int = 0,
) -> Result:
    """Returns o [B, M, H, Dv] of q [B, M, H, D] against caches [B, capacity, Hkv, D], inference alone.

    k, v: [B, new, Hkv, D], or with cu_seqlens_k_new: i32[B + 1] end to end; written into the caches behind
    their first cache_seqlens rows, in place, before q is attended.
    cache_seqlens: i32[B], or one number; all of the cache if left out. cache_leftpad: i32[B], hidden rows at
    the start. cache_batch_idx: i32[B], which row of the cache a sequence is (the cache is copied where its
    capacity is no multiple of 16). block_table, or page_table: i32[B, P]; caches are [pages, page, Hkv, D].
    cu_seqlens_q: i32[B + 1], then q is [Tq, H, D] and lse f32[H, Tq], else f32[B, H, M].
    num_splits: programs that share the keys of up to 16 queries, 0 for the device's choice.
    out: where o goes. rotary_interleaved says nothing without rotary_cos; max_seqlen_q, scheduler_metadata,
    pack_gqa, sm_margin, ver and fa_version are hints that are not needed.
    """
    name = "flash_attn_with_kvcache"
    refuse(name, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens)
    refuse(name, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(name, attention_chunk=attention_chunk)
    table = one_of(name, block_table=block_table, page_table=page_table)
    sink = one_of(name, s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)
    if table is not None:
        refuse(f"{name} with block_table", cache_batch_idx=cache_batch_idx)
    if (k is None) != (v is None):
        raise ValueError(f"{name}: expected both k and v or neither")
    batch = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if cache_batch_idx is not None:
        _check_shapes(name, cache_batch_idx=(cache_batch_idx, [batch]))
    lengths: Any = cache_seqlens
    if not isinstance(lengths, torch.Tensor) and hasattr(lengths, "__index__"):  # NumPy's integers too
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    if k is not None and v is not None:
        if lengths is None:
            raise ValueError(
                f"{name}: cache_seqlens: expected lengths, as k is written behind them, got None"
            )
        check(name, q, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
        _check_shapes(name, cache_seqlens=(lengths, [batch]))
        rows = [batch, k.shape[1]] if cu_seqlens_k_new is None else [len(k)]
        if cu_seqlens_k_new is not None:
            _check_shapes(name, cu_seqlens_k_new=(cu_seqlens_k_new, [batch + 1]))
        _check_shapes(name, k=(k, [*rows, *k_cache.shape[-2:]]), v=(v, [*rows, *v_cache.shape[-2:]]))
        new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
        for cache, added in ((k_cache, k), (v_cache, v)):
            append(cache, added, lengths, table=table, batch=cache_batch_idx, starts=cu_seqlens_k_new)
        lengths = (lengths + new).int()
    if cache_batch_idx is not None:
        k_cache, v_cache, table = _chosen(k_cache, v_cache, cache_batch_idx)
        if table is not None and lengths is None:
            capacity = table.shape[1] * k_cache.shape[1]
            lengths = torch.full((batch,), capacity, dtype=torch.int32, device=q.device)
    call = Call(name, q, k_cache, v_cache, is_inference=True)
    call.score(softmax_scale, softcap, alibi_slopes, sink)
    call.mask(causal, window_size)
    if cu_seqlens_q is not None:
        call.ragged(cu_seqlens_q, None)
    if table is not None:
        if lengths is None:
            raise ValueError(f"{name}: cache_seqlens: expected lengths beside block_table, got None")
        call.paged(table)
    if lengths is not None:
        call.length("cache_seqlens", lengths)
    if cache_leftpad is not None:
        call.pad(cache_leftpad)
    o, lse = call.run(num_splits, out)
    return (o, lse) if return_softmax_lse or return_lse else o


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *arguments: Any, **options: Any) -> Result:
    """Returns `flash_attn_func` of qkv [B, N, 3, H, D]; further arguments as there."""
    q, k, v = unpacked("flash_attn_qkvpacked_func", "qkv", qkv, 2, 3)
    return flash_attn_func(q, k, v, *arguments, **options)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *arguments: Any, **options: Any) -> Result:
    """Returns `flash_attn_func` of q and kv [B, N, 2, Hkv, D]; further arguments as there."""
    k, v = unpacked("flash_attn_kvpacked_func", "kv", kv, 2, 2)
    return flash_attn_func(q, k, v, *arguments, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *arguments: Any, **options: Any
) -> Result:
    """Returns `flash_attn_varlen_func` of qkv [T, 3, H, D]; further arguments as there, from dropout_p on."""
    q, k, v = unpacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 1, 3)
    shared: tuple[Any, ...] = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *shared, *arguments, **options)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *arguments: Any, **options: Any
) -> Result:
    """Returns `flash_attn_varlen_func` of q and kv [Tk, 2, Hkv, D]; further arguments as there."""
    k, v = unpacked("flash_attn_varlen_kvpacked_func", "kv", kv, 1, 2)
    return flash_attn_varlen_func(q, k, v, *arguments, **options)


def _check_shapes(name: str, **shapes: tuple[Any, list[int]]) -> None:
    """Holds (tensor, its shape) to each other, so that nothing is written that does not fit. TypeError and
    ValueError name the argument.
    """
    for which, (x, wanted) in shapes.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: {which}: expected a tensor, got {type(x).__name__}")
        if list(x.shape) != wanted:
            raise ValueError(f"{name}: {which}: expected shape {wanted}, got {list(x.shape)}")


def _returned(
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


def _chosen(
    k: torch.Tensor, v: torch.Tensor, batch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Caches whose rows are those of `batch`: as pages with a table where that needs no copy."""
    capacity = k.shape[1]
    page = next((size for size in (256, 128, 64, 32, 16) if capacity % size == 0), 0)
    whole = all(x.stride(0) == capacity * x.stride(1) for x in (k, v))
    if not page or not whole:
        return k[batch.long()], v[batch.long()], None
    count = capacity // page
    table = batch.int()[:, None] * count + torch.arange(count, dtype=torch.int32, device=batch.device)
    return k.view(-1, page, *k.shape[2:]), v.view(-1, page, *v.shape[2:]), table
