"""flash-attention's function of a cache: new keys and values are rotated and written behind those that are
there, then queries attend to all.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch

from attnc.api.repeats import are_left_out, repeat
from attnc.api.tensors import INTEGERS, GivenTensors, refuse_gradients
from attnc.compat.call import Call, Window, check, one_of, one_sink, refuse, window
from attnc.compat.rotary import find_rows, rotate_new

#: GivenTensors of a call that its kernel may take, by its names for them.
_CACHED = (
    "q", "k", "v", "cu_seqlens_q", "block_table", "cache_seqlens", "cache_leftpad", "alibi_slopes", "s_aux",
)  # fmt: skip


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
) -> Any:
    """Returns o [B, M, H, Dv] of q [B, M, H, D] against caches [B, capacity, Hkv, D]. For inference: no
    gradients.

    k, v: new keys and values [B, new, Hkv, D], or end to end, with cu_seqlens_k_new: i32[B + 1]. They are
        written into the caches, in place, behind the first cache_seqlens rows, and are visible to q
    cache_seqlens: i32[B], or one number: rows of the caches that count; all of them if None
    cache_leftpad: i32[B], rows at the start that are hidden
    cache_batch_idx: i32[B], the row of the caches that belongs to each sequence. Caches whose capacity is
        not a multiple of 16 are copied
    block_table, page_table: i32[B, P], for caches in pages [pages, page, Hkv, D]
    cu_seqlens_q: i32[B + 1], for q [Tq, H, D] with sequences end to end
    num_splits: programs that share the keys of up to 16 queries, and of chunks that would leave most of a
        Hopper GPU idle, but for 1; 0: as many as suit the device
    rotary_cos, rotary_sin: [positions, R / 2], R <= D, of q's type or float32, together with k and v. The
        first R columns of row i of k are rotated by the angle of position cache_seqlens + i (or
        rotary_seqlens + i, i32[B]) before they are written. Rows of q are rotated in the same way if the
        mask is causal or a window, otherwise all of them by position cache_seqlens
    rotary_interleaved: True rotates columns 2 i and 2 i + 1 as a pair, False columns i and i + R / 2
    return_lse, return_softmax_lse: returns (o, lse), with lse f32[B, H, M], or f32[H, Tq] of packed queries
    out: the tensor that o is written to
    max_seqlen_q: 1, beside packed queries, chooses the kernels for few queries of a sequence
    scheduler_metadata, pack_gqa, sm_margin, ver, fa_version: taken, without an effect on results

    Other arguments are as of `flash_attn_func`. Raises TypeError or ValueError with the argument's name.
    """
    name = "flash_attn_with_kvcache"
    key = None
    others = (
        k, v, rotary_cos, rotary_sin, rotary_seqlens, cache_batch_idx, qv, q_descale, k_descale, v_descale,
        cu_seqlens_k_new, out,
    )  # fmt: skip
    known = block_table if page_table is None else page_table
    sink = one_sink(name, s_aux, learnable_sink, sinks)
    given = (q, k_cache, v_cache, cu_seqlens_q, known, cache_seqlens, cache_leftpad, alibi_slopes, sink)
    is_one_table = block_table is None or page_table is None
    if not attention_chunk and is_one_table and are_left_out(*others):
        has_one = max_seqlen_q == 1
        key, found = repeat((name, softmax_scale, causal, window_size, softcap, num_splits, has_one), given)
        if found is not None:
            (results,) = found
            return results if return_softmax_lse or return_lse else results[0]
    refuse(name, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(name, attention_chunk=attention_chunk)
    table = one_of(name, block_table=block_table, page_table=page_table)
    if table is not None:
        refuse(f"{name} with block_table", cache_batch_idx=cache_batch_idx)
    if (k is None) != (v is None):
        raise ValueError(f"{name}: k, v: expected both or neither, got {'v' if k is None else 'k'} alone")
    if (rotary_cos is None) != (rotary_sin is None):
        came = "rotary_sin" if rotary_cos is None else "rotary_cos"
        raise ValueError(f"{name}: rotary_cos, rotary_sin: expected both or neither, got {came} alone")
    if k is None:
        refuse(f"{name} without k and v", rotary_cos=rotary_cos)
    if rotary_cos is None:
        refuse(f"{name} without rotary_cos", rotary_seqlens=rotary_seqlens)
    axes = ("B M H D" if cu_seqlens_q is None else "T H D", *_axes_of_caches(table, cache_batch_idx))
    checked = check(name, axes, q=q, k_cache=k_cache, v_cache=v_cache)
    refuse_gradients(
        name, q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        alibi_slopes=alibi_slopes, s_aux=sink,
    )  # fmt: skip
    if cu_seqlens_q is not None:
        checked.check("cu_seqlens_q", cu_seqlens_q, "B+1", (torch.int32,))
    if table is not None:
        checked.check("page_table" if block_table is None else "block_table", table, "B _", (torch.int32,))
    if cache_batch_idx is not None:
        checked.check("cache_batch_idx", cache_batch_idx, "B", INTEGERS)
    batch = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    lengths: Any = cache_seqlens
    is_number = isinstance(lengths, int) or _is_numpy_number(lengths)
    if is_number:
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    if lengths is None and (k is not None or table is not None):
        why = "as k is written behind them" if k is not None else "beside block_table"
        raise ValueError(f"{name}: cache_seqlens: expected lengths, {why}, got None")
    if lengths is not None:
        checked.check("cache_seqlens", lengths, "B", (torch.int32,))
    if k is not None and v is not None:
        _check_new(checked, k, v, cu_seqlens_k_new, q.dtype)
    _check_room(name, k_cache, k, cache_seqlens if is_number else lengths, table)
    call = Call(name, q, k_cache, v_cache, checked, is_inference=True)
    call.score(softmax_scale, softcap, alibi_slopes, sink)
    call.mask(causal, window_size)
    if k is not None and v is not None:
        if rotary_cos is not None and rotary_sin is not None:
            begins = lengths if rotary_seqlens is None else rotary_seqlens
            checked.check("rotary_seqlens", begins, "B", INTEGERS)
            is_causal, left, right = window(name, causal, window_size)
            q, k = rotate_new(
                checked,
                q,
                k,
                rotary_cos,
                rotary_sin,
                begins,
                starts_q=cu_seqlens_q,
                starts_k=cu_seqlens_k_new,
                interleaved=rotary_interleaved,
                walks=is_causal or left is not None or right is not None,
            )
        new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
        for cache, added in ((k_cache, k), (v_cache, v)):
            append(cache, added, lengths, table=table, batch=cache_batch_idx, starts=cu_seqlens_k_new)
        lengths = (lengths + new).int()
    if cache_batch_idx is not None:
        k_cache, v_cache, table = _choose_caches(k_cache, v_cache, cache_batch_idx)
        if table is not None and lengths is None:
            capacity = table.shape[1] * k_cache.shape[1]
            lengths = torch.full((batch,), capacity, dtype=torch.int32, device=q.device)
    call.hold(q, k_cache, v_cache)
    if cu_seqlens_q is not None:
        call.set_ragged(cu_seqlens_q, None, most=max_seqlen_q)
    if table is not None:
        call.set_paged(table)
    if lengths is not None:
        call.length("cache_seqlens", lengths)
    if cache_leftpad is not None:
        call.pad(cache_leftpad)
    o, lse = call.run(num_splits, out, key=key, given=dict(zip(_CACHED, given, strict=True)))
    return (o, lse) if return_softmax_lse or return_lse else o


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
    new: [B, rows, H, D], or with starts: i32[B + 1] the sequences end to end, [total, H, D]; rows behind the
        last sequence are written nowhere
    """
    with torch.no_grad():
        sequences, at = find_rows(new, starts, len(lengths))
        new = new.flatten(0, 1) if starts is None else new
        at = lengths[sequences] + at
        if (
            starts is not None
        ):  # what is behind the last row is taken for that row, which is then written again
            kept = torch.arange(len(new), device=new.device).minimum((starts[-1] - 1).clamp(min=0))
            sequences, at, new = sequences[kept], at[kept], new[kept]
            at = at.clamp(max=(cache.shape[1] if table is None else table.shape[1] * cache.shape[1]) - 1)
        if table is not None:
            page = cache.shape[1]
            where = (table[sequences, at // page].long(), at % page)
        else:
            where = (sequences if batch is None else batch[sequences].long(), at)
        cache[where] = new if starts is None else torch.where(starts[-1] > 0, new, cache[where])


def _axes_of_caches(table: torch.Tensor | None, cache_batch_idx: torch.Tensor | None) -> tuple[str, str]:
    if table is not None:
        return "P page Hkv D", "P page Hkv Dv"
    rows = "B" if cache_batch_idx is None else "C"
    return f"{rows} N Hkv D", f"{rows} N Hkv Dv"


def _check_new(
    checked: GivenTensors, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None, dtype: torch.dtype
) -> None:
    if starts is not None:
        checked.check("cu_seqlens_k_new", starts, "B+1", (torch.int32,))
    rows = "B new" if starts is None else "new"
    checked.check("k", k, f"{rows} Hkv D", (dtype,), "like q")
    checked.check("v", v, f"{rows} Hkv Dv", (dtype,), "like q")


def _check_room(
    name: str, cache: torch.Tensor, new: torch.Tensor | None, lengths: Any, table: torch.Tensor | None
) -> None:
    """Raises ValueError where a sequence is longer than its cache, with the new rows behind it, as far as the
    host knows lengths.
    """
    room = cache.shape[1] if table is None else table.shape[1] * cache.shape[1]
    if new is not None and new.numel() and not (cache.numel() and room):
        raise ValueError(f"{name}: k_cache: expected rows to write to, got {list(cache.shape)}")
    count = new.shape[1] if new is not None and new.dim() == 4 else 0
    for length in _known_lengths(lengths):
        if not 0 <= length <= room - count:
            behind = f", as {count} more go behind them in {room}" if count else ""
            raise ValueError(
                f"{name}: cache_seqlens: expected 0 to {room - count} rows{behind}, got {length}"
            )


def _is_numpy_number(lengths: Any) -> bool:
    is_index = isinstance(lengths, SupportsIndex) and not isinstance(lengths, torch.Tensor)
    return is_index and not getattr(lengths, "ndim", 0)


def _known_lengths(lengths: Any) -> list[int]:
    """Returns the least and the most of lengths: of a number, and of a tensor on a CPU. None of those of a
    GPU, which it would have to wait for, nor while a graph is traced.
    """
    if lengths is None or torch.compiler.is_compiling():
        return []
    if not isinstance(lengths, torch.Tensor):
        return [int(lengths)]
    if type(lengths) is not torch.Tensor or lengths.device.type != "cpu" or not lengths.numel():
        return []
    return [int(lengths.min()), int(lengths.max())]


def _choose_caches(
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
