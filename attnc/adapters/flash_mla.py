"""FlashMLA's functions: `from attnc.adapters.flash_mla import flash_mla_sparse_fwd`.

Latent attention over the keys that an indexer has selected for each query, in a prompt or from a cache, and
decoding over all keys of a cache. Arguments, their order and what leaves are those of FlashMLA, which is not
imported. Here any number of query heads is taken, and a list that names a key twice counts it once. Rows of
several types (`latent_rows`) are read as they lie (`latent_kernels`), or converted to 16 bits first, as many
as a call uses.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import torch

from attnc.adapters.latent_kernels import attend_listed, attend_pages, reads_rows
from attnc.adapters.latent_rows import RowFormat, check_pages, format_of
from attnc.adapters.specs import Kernel, Wanted, kernel, number_of, refuse
from attnc.api.tensors import FLOATS, INTEGERS, NUMBERS, GivenTensors, refuse_gradients
from attnc.diagnostics.shown import show_value

Results: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]

_SELECTED = "listed(indices[b, q_idx], keys = 1, count = topk_length[b, q_idx])"
#: Rows of queries and heads that a tile of Triton's kernel can have.
_TILES = (16, 32, 64)
#: Queries whose keys are gathered together for their largest scores.
_QUERIES_AT_ONCE = 64
#: Heads of neighbouring queries that share tiles on Hopper, at most; keys whose bits are found in few passes;
#: queries of a call that have tiles of their own.
_FEW_HEADS, _MOST_TOGETHER, _ALONE = 32, 1 << 18, 256


class FlashMLASchedMeta:
    """What `get_mla_metadata` returns: kernels here share work out by shapes, and need no plan."""


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """Returns the values that `flash_mla_with_kvcache` takes as `tile_scheduler_metadata` and
    `num_splits`.
    """
    return FlashMLASchedMeta(), None


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
    *,
    wants_max_logits: bool = False,
) -> Results:
    """Returns (o [s_q, h_q, d_v], largest scores f32[s_q, h_q], lse f32[s_q, h_q]) of q [s_q, h_q, d] and
    kv [s_kv, 1, d], whose first d_v columns are the values.

    indices: i32 or i64 [s_q, 1, topk], keys of each query; below 0 or from s_kv on they say nothing.
    topk_length: i32[s_q], how many of them count. attn_sink: f32[h_q], a logit that joins the denominator of
    o alone. lse: natural logarithm, plus infinity where a query sees no key, and o is 0. Largest scores are
    None unless `wants_max_logits`: they take a pass of their own, in PyTorch. indexer_topk is not supported.
    Raises TypeError or ValueError with the name of an argument.
    """
    name = "flash_mla_sparse_fwd"
    refuse(name, indexer_topk=indexer_topk)
    checked = _check_keys(name, q, ("M H D", "N 1 D"), kv=kv)
    checked.check("indices", indices, "M 1 topk", INTEGERS)
    _check_sink(checked, name, attn_sink)
    lists, counts = indices[None, :, 0], _counts(checked, "topk_length", topk_length, "M", indices)[None]
    _check_values(name, "d_v", d_v, q)
    o, lse = _attend(name, q[None], kv[None], lists, counts, sm_scale, d_v)
    largest = _max_logits(q, kv[:, 0], lists[0], counts[0], sm_scale) if wants_max_logits else None
    return _join_sink(o, lse, attn_sink)[0], largest, _mark_lonely_rows(lse)[0]


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object = None,
    num_splits: object = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (o [B, s_q, h_q, head_dim_v], lse f32[B, h_q, s_q]) of q [B, s_q, h_q, d] and a cache
    [pages, page, 1, d], whose first head_dim_v columns are the values.

    indices: i32 or i64 [B, s_q, topk], page * size + row of the keys of each query, -1 for none; topk_length:
    i32[B], how many count. Without: all keys, block_table i32[B, P] and cache_seqlens i32[B], where causal
    aligns the last query with the last key. softmax_scale: 1 / sqrt(d) if None. attn_sink and lse: as in
    `flash_mla_sparse_fwd`. tile_scheduler_metadata and num_splits are not needed.

    is_fp8_kvcache: rows hold several types (`latent_rows`), beside q of bf16 and as many columns. Hopper's
    kernels read those of the pages in block_table, and those in lists, as they lie (`latent_kernels`).
    Otherwise, and beside a second cache, such rows are converted first, to two bytes for each column.
    extra_k_cache, beside indices alone: a second cache of the same format, in pages of any size, with lists
    and counts of its own, extra_indices_in_kvcache [B, s_q, extra] and extra_topk_length i32[B]; a query sees
    the keys of both. Raises TypeError or ValueError with the name of an argument.
    """
    name = "flash_mla_with_kvcache"
    extra = {
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "extra_topk_length": extra_topk_length,
    }
    if not is_fp8_kvcache or indices is None or extra_k_cache is None:
        refuse(name, **extra)
    form = None
    if is_fp8_kvcache:
        checked = _check_keys(name, q, ("B M H D", ""))
        form = _check_packed(name, "k_cache", q, k_cache)
    else:
        checked = _check_keys(name, q, ("B M H D", "P page 1 D"), k_cache=k_cache)
        checked.check_pages("k_cache", q)
    _check_values(name, "head_dim_v", head_dim_v, q)
    _check_sink(checked, name, attn_sink)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if indices is None:
        refuse(name, topk_length=topk_length)
        if block_table is None or cache_seqlens is None:
            missing = "block_table" if block_table is None else "cache_seqlens"
            raise ValueError(f"{name}: {missing}: expected a tensor, or indices, got None")
        checked.check("block_table", block_table, "B _", (torch.int32,))
        checked.check("cache_seqlens", cache_seqlens, "B", (torch.int32,))
        if form is not None and reads_rows(name, q, k_cache, head_dim_v):
            scale = number_of(f"{name}: softmax_scale", scale)
            o, lse = attend_pages(q, k_cache, block_table, cache_seqlens, scale, form, causal=bool(causal))
        else:
            if form is not None:
                k_cache, block_table = _unpack_pages(k_cache, form, block_table)
            o, lse = _attend_all(name, q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal)
    else:
        refuse(name, causal=causal)
        checked.check("indices", indices, "B M topk", INTEGERS)
        if topk_length is not None:
            checked.check("topk_length", topk_length, "B", (torch.int32,))
        beside = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
        lists = (k_cache, indices, topk_length)
        o, lse = _attend_listed(checked, name, q, form, lists, beside, scale, head_dim_v)
    return _join_sink(o, lse, attn_sink), _mark_lonely_rows(lse).mT.contiguous()


def _attend_listed(
    checked: GivenTensors,
    name: str,
    q: torch.Tensor,
    form: RowFormat | None,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    beside: tuple[Any, Any, Any],
    scale: Any,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends over rows of a cache that lists name. given: the cache, its lists and how many of their entries
    count; beside: the same of a second cache, of None where there is none; columns: of values.
    """
    cache, lists, counted = given
    if form is not None and beside[0] is None and reads_rows(name, q, cache, columns):
        counts = _counts(checked, "topk_length", counted, "B", lists)[:, None].expand(q.shape[:2])
        return attend_listed(q, cache, lists, counts, number_of(f"{name}: softmax_scale", scale), form)
    if form is not None:
        named = [given]
        if beside[0] is not None:
            named.append(_read_extra(checked, name, q, form, *beside))
        keys, lists = _unpack_listed(form, named)
        counted = None  # entries that do not count are -1
    else:
        keys = _pool(name, cache).expand(len(q), -1, -1, -1)
    counts = _counts(checked, "topk_length", counted, "B", lists)[:, None].expand(q.shape[:2])
    return _attend(name, q, keys, lists, counts, scale, columns)


# --- arguments


def _check_keys(function: str, q: torch.Tensor, axes: tuple[str, str], **keys: Any) -> GivenTensors:
    """Holds q, and keys of its type by their name, to these axes; returns what the rest is held to."""
    checked = GivenTensors(function)
    checked.check("q", q, axes[0], FLOATS)
    checked.check_range("q", "H", 1)
    checked.check_columns(q="D")
    for name, x in keys.items():
        checked.check(name, x, axes[1], (q.dtype,), "like q")
    checked.check_rows(q=q, **keys)
    refuse_gradients(function, q=q, **keys)
    return checked


def _check_values(function: str, name: str, columns: Any, q: torch.Tensor) -> None:
    if not isinstance(columns, int) or not 1 <= columns <= q.shape[-1]:
        raise ValueError(
            f"{function}: {name}: expected an integer from 1 to {q.shape[-1]}, the columns of a key, got"
            f" {show_value(columns)}"
        )


def _check_sink(checked: GivenTensors, function: str, sink: torch.Tensor | None) -> None:
    if sink is not None:
        checked.check("attn_sink", sink, "H", NUMBERS)
        refuse_gradients(function, attn_sink=sink)


def _check_packed(function: str, name: str, q: torch.Tensor, cache: torch.Tensor) -> RowFormat:
    """Returns the format of a cache's rows, which lie one behind the other in a page."""
    GivenTensors(function).check(name, cache, "_ _ _ _", (torch.uint8, torch.float8_e4m3fn))
    form = format_of(f"{function}: {name}", cache)
    if cache.shape[2] != 1:
        raise ValueError(f"{function}: {name}: expected one head, got {list(cache.shape)}")
    check_pages(f"{function}: {name}", cache, form)
    if q.dtype != torch.bfloat16 or q.shape[-1] != form.columns:
        got = f"{q.dtype} {list(q.shape)}"
        raise ValueError(
            f"{function}: q: expected torch.bfloat16 [..., {form.columns}] beside such rows, got {got}"
        )
    return form


def _pool(function: str, cache: torch.Tensor) -> torch.Tensor:
    pages, page, _, width = cache.shape
    try:
        return cache.view(1, pages * page, 1, width)
    except RuntimeError:
        message = f"expected pages that follow each other in memory, got strides {cache.stride()}"
        raise ValueError(f"{function}: k_cache: {message}") from None


# --- rows of several types

#: A cache, lists of its rows [B, M, n], and how many of each sequence's count [B], None for all.
Named: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _read_extra(
    checked: GivenTensors,
    function: str,
    q: torch.Tensor,
    form: RowFormat,
    cache: torch.Tensor,
    lists: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> Named:
    if _check_packed(function, "extra_k_cache", q, cache) is not form:
        got = f"got shape {list(cache.shape)}"
        raise ValueError(f"{function}: extra_k_cache: expected rows of {form.bytes} bytes, {got}")
    name = "extra_indices_in_kvcache"
    if lists is None:
        raise ValueError(f"{function}: {name}: expected a tensor beside extra_k_cache, got None")
    checked.check(name, lists, "B M extra", INTEGERS)
    if lengths is not None:
        checked.check("extra_topk_length", lengths, "B", (torch.int32,))
    return cache, lists, lengths


def _unpack_pages(
    cache: torch.Tensor, form: RowFormat, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pages of a table in 16 bits, sequence after sequence, and the table of these. What stands
    behind the last page of a sequence may be any number.
    """
    from attnc.runtime.packed_rows import unpack_listed  # brings Triton

    pages, page = cache.shape[:2]
    found = table.flatten().long()
    named = torch.where((found >= 0) & (found < pages), found, 0)
    rows = named[:, None] * page + torch.arange(page, device=table.device)
    made = cache.new_empty((1, rows.numel(), form.columns), dtype=torch.bfloat16)
    unpack_listed(cache.view(torch.uint8), form.packing, rows.view(1, 1, -1), made, once=False)
    order = torch.arange(table.numel(), dtype=torch.int32, device=table.device)
    return made.view(table.numel(), page, 1, form.columns), order.view(table.shape)


def _unpack_listed(form: RowFormat, named: list[Named]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows that lists name, in 16 bits, [B, R, 1, columns], and lists of these [B, M, n]: each
    row of a list once, those of the first cache before those of the second, in their order there.
    """
    from attnc.runtime.packed_rows import unpack_listed  # brings Triton

    sizes = [lists.shape[1] * lists.shape[2] for _, lists, _ in named]
    cache, given, _ = named[0]
    made = cache.new_empty((len(given), sum(sizes), form.columns), dtype=torch.bfloat16)
    found, first = [], 0
    for (cache, lists, counts), size in zip(named, sizes, strict=True):
        if counts is not None:
            places = torch.arange(lists.shape[2], device=lists.device)
            lists = torch.where(places < counts[:, None, None], lists, -1)
        ordered = lists.sort(dim=-1).values
        found.append(unpack_listed(cache.view(torch.uint8), form.packing, ordered, made, first=first))
        first += size
    return made[:, :, None], found[0] if len(found) == 1 else torch.cat(found, -1)


def _counts(
    checked: GivenTensors, name: str, given: torch.Tensor | None, size: str, indices: torch.Tensor
) -> torch.Tensor:
    if given is None:
        shape = indices.shape[:1]
        return torch.full(shape, indices.shape[-1], dtype=torch.int32, device=indices.device)
    checked.check(name, given, size, (torch.int32,))
    return given


# --- kernels


def _attend(
    function: str,
    q: torch.Tensor,
    kv: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (o [B, M, H, width], lse [B, M, H]) over the keys in lists [B, M, topk], without a sink."""
    scale = number_of(f"{function}: sm_scale", scale)
    is_wide = lists.dtype == torch.int64
    _, queries, heads, head_dim = q.shape
    are_many = queries > _ALONE and kv.shape[1] <= _MOST_TOGETHER
    together = heads if are_many and heads <= _FEW_HEADS else 0
    made = _selected_kernel(q.dtype, head_dim, width, scale, is_wide, _tile_rows(heads), together)
    o, lse = made(q, kv, indices=lists, topk_length=counts)
    return o, lse


@lru_cache(maxsize=64)
def _selected_kernel(
    dtype: torch.dtype, head_dim: int, width: int, scale: float, is_wide: bool, rows: int, together: int
) -> Kernel:
    """together: heads of queries that share tiles over the union of their lists, 0 where each has its own."""
    heads = str(together) if together else "G"
    return kernel(
        Wanted(
            name="sparse_latent_attention",
            dtype=dtype,
            head_dim=head_dim,
            value_dim=width,
            scale=scale,
            q=f"[B, M, {heads}, D]",
            kv="[B, N, 1, D]",
            value="[B, N, 1, Dv] via prefix(k)",
            o=f"[B, M, {heads}, Dv]",
            lse=f"[B, M, {heads}]",
            inputs=(f"indices: {'i64' if is_wide else 'i32'}[B, M, S]", "topk_length: i32[B, M]"),
            length="",
            mask=_SELECTED,
            decode=True,
            split=False,
            rows=rows,
            unites=together > 0,
        )
    )


def _attend_all(
    function: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    width: int,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (o [B, M, H, width], lse [B, M, H]) over all keys of a cache, without a sink."""
    scale = number_of(f"{function}: softmax_scale", scale)
    page, rows = k_cache.shape[1], _tile_rows(q.shape[1] * q.shape[2])
    made = _paged_kernel(q.dtype, q.shape[-1], width, scale, page, bool(causal), rows)
    o, lse = made(q, k_cache, block_table=block_table, kv_len=lengths)
    return o, lse


@lru_cache(maxsize=64)
def _paged_kernel(
    dtype: torch.dtype, head_dim: int, width: int, scale: float, page: int, causal: bool, rows: int
) -> Kernel:
    return kernel(
        Wanted(
            name="latent_attention",
            dtype=dtype,
            head_dim=head_dim,
            value_dim=width,
            scale=scale,
            q="[B, M, G, D]",
            kv=f"[B, N, 1, D] via paged(block_table, page = {page})",
            value="[B, N, 1, Dv] via prefix(k)",
            o="[B, M, G, Dv]",
            lse="[B, M, G]",
            inputs=("block_table: i32[B, P]", "kv_len: i32[B]"),
            length="kv_len",
            mask="causal" if causal else "",
            decode=True,
            rows=rows,
        )
    )


def _tile_rows(rows: int) -> int:
    return next((tile for tile in _TILES if rows <= tile), _TILES[-1])


# --- results


def _join_sink(o: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Returns o [B, M, H, Dv] with a logit of each head in its denominator, which lse does not know."""
    if sink is None:
        return o
    share = torch.sigmoid(lse - sink.float())
    return (o * torch.where(lse == -torch.inf, 0.0, share)[..., None]).to(o.dtype)


def _mark_lonely_rows(lse: torch.Tensor) -> torch.Tensor:
    """Returns lse as FlashMLA has it: plus infinity for a query that sees no key."""
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _max_logits(
    q: torch.Tensor, keys: torch.Tensor, lists: torch.Tensor, counts: torch.Tensor, scale: float
) -> torch.Tensor:
    """Returns the largest score f32[M, H] of each query, minus infinity where it sees no key."""
    found = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    places = torch.arange(lists.shape[1], device=q.device)
    if not lists.shape[1] or not len(keys):
        return found
    for first in range(0, len(q), _QUERIES_AT_ONCE):
        rows = slice(first, first + _QUERIES_AT_ONCE)
        named = (places < counts[rows, None]) & (lists[rows] >= 0) & (lists[rows] < len(keys))
        gathered = keys[torch.where(named, lists[rows], 0).long()].float()
        scores = torch.einsum("mhd,msd->mhs", q[rows].float(), gathered) * scale
        found[rows] = scores.masked_fill(~named[:, None], -torch.inf).amax(-1)
    return found
