"""FlashInfer's functions that write keys and values of new tokens into pages."""

from __future__ import annotations

from typing import Any

import torch

from attnc.adapters.flashinfer.arguments import check_integer, check_layout
from attnc.adapters.flashinfer.paged import Cache, split_cache
from attnc.adapters.specs import NARROW
from attnc.api.tensors import FLOATS, INTEGERS, GivenTensors


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns the keys of each request, [B], of tables whose last pages have kv_last_page_len: [B] of them.

    kv_indptr: [B + 1]; without a page a request has as many as kv_last_page_len says, as in FlashInfer.
    """
    given = GivenTensors("get_seq_lens")
    given.check("kv_last_page_len", kv_last_page_len, "B", INTEGERS)
    given.check("kv_indptr", kv_indptr, "B+1", INTEGERS)
    page = check_integer("get_seq_lens: page_size", page_size, 1)
    return (kv_indptr.diff() - 1).clamp(min=0) * page + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the request of each new token, and where it stands in that, i32[nnz] both, -1 and 0 for tokens
    behind the last request.

    append_indptr: [B + 1], where new tokens of requests begin; seq_lens: [B], keys with those; batch_indices,
    positions: i32[nnz], where the results go
    """
    given = GivenTensors("get_batch_indices_positions")
    given.check("append_indptr", append_indptr, "B+1", INTEGERS)
    given.check("seq_lens", seq_lens, "B", INTEGERS, anywhere=True)
    count = check_integer("get_batch_indices_positions: nnz", nnz, 0)
    for name, x in (("batch_indices", batch_indices), ("positions", positions)):
        if x is not None:
            given.check(name, x, [count], (torch.int32,))
    ends, at = append_indptr[1:], torch.arange(count, device=append_indptr.device)
    found = torch.searchsorted(ends, at.to(ends.dtype), right=True)
    is_token = found < len(ends)
    request = found.clamp(max=max(len(ends) - 1, 0))
    if not len(ends):
        made = torch.full_like(at, -1), torch.zeros_like(at)
    else:
        last = seq_lens.to(ends.device) - ends
        made = torch.where(is_token, found, -1), torch.where(is_token, at + last[request], 0)
    into = [torch.empty_like(at, dtype=torch.int32) if x is None else x for x in (batch_indices, positions)]
    return into[0].copy_(made[0]), into[1].copy_(made[1])


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes keys and values of new tokens into their pages. Never waits for the device.

    append_key: [T, Hkv, D]; append_value: [T, Hkv, Dv]; batch_indices, positions: [T], of
    `get_batch_indices_positions`; a negative request is that of padding. paged_kv_cache: as of
    `BatchDecodeWithPagedKVCacheWrapper.run`, of the type of append_key. kv_indices, kv_indptr: pages of each
    request, with those of the new tokens; kv_last_page_len is not needed.
    TypeError and ValueError name an argument of another type or shape.
    """
    given = GivenTensors("append_paged_kv_cache")
    pools = split_cache(paged_kv_cache)
    heads_first = check_layout(kv_layout) == "HND"
    axes = "P Hkv page" if heads_first else "P page Hkv"
    for (name, rows), x, width in zip(
        (("append_key", append_key), ("append_value", append_value)), pools, ("D", "Dv"), strict=True
    ):
        given.check("paged_kv_cache", x, f"{axes} {width}", _TYPES)
        given.check(name, rows, f"T Hkv {width}", (x.dtype,), "like the cache")
        given.check_rows(**{name: rows, "paged_kv_cache": x})
    given.check_range("paged_kv_cache", "page", 1)
    if heads_first:
        pools = pools[0].transpose(1, 2), pools[1].transpose(1, 2)
    slots = _find_slots(given, pools[0].shape[1], batch_indices, positions, kv_indices, kv_indptr)
    _store(append_key, append_value, *pools, slots)


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Writes latents, [T, ckv], and rotated keys, [T, kpe], of new tokens into pages [P, page, ckv] and
    [P, page, kpe]; the rest as of `append_paged_kv_cache`.
    """
    given = GivenTensors("append_paged_mla_kv_cache")
    for kind, cache, rows in (("ckv", ckv_cache, append_ckv), ("kpe", kpe_cache, append_kpe)):
        given.check(f"{kind}_cache", cache, f"P page {kind}", _TYPES)
        given.check(f"append_{kind}", rows, f"T {kind}", (cache.dtype,), "like the cache")
        given.check_rows(**{f"append_{kind}": rows, f"{kind}_cache": cache})
    given.check_range("ckv_cache", "page", 1)
    slots = _find_slots(given, ckv_cache.shape[1], batch_indices, positions, kv_indices, kv_indptr)
    _store(append_ckv[:, None], append_kpe[:, None], ckv_cache[:, :, None], kpe_cache[:, :, None], slots)


#: Of elements that caches may have: those of queries, and of 8 bits.
_TYPES = (*FLOATS, *NARROW)


def _find_slots(given: GivenTensors, page: int, *tables: Any) -> torch.Tensor:
    """Returns the row of each new token in the flat cache, i64[T], -1 for none and outside of the tables.

    tables: the requests and positions of new tokens, the pages of requests, and where these begin.
    """
    names = ("batch_indices", "positions", "kv_indices", "kv_indptr")
    for name, x, shape in zip(names, tables, ("T", "T", "pages", "B+1"), strict=True):
        given.check(name, x, shape, INTEGERS)
    request, position, pages, starts = (x.long() for x in tables)
    if not len(pages) or len(starts) < 2:
        return torch.full_like(request, -1)
    at = starts[request.clamp(0, len(starts) - 2)] + position.clamp(min=0) // page
    slot = pages[at.clamp(max=len(pages) - 1)] * page + position % page
    is_known = (request >= 0) & (request < len(starts) - 1) & (position >= 0) & (at < len(pages))
    return torch.where(is_known, slot, -1)


def _store(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes rows to slots, as they are: of 8 bits as bytes."""
    from attnc.runtime.slots import store  # which imports Triton

    if k_cache.dtype in NARROW:
        k, v, k_cache, v_cache = (x.view(torch.uint8) for x in (k, v, k_cache, v_cache))
    store(k, v, k_cache, v_cache, slots)
