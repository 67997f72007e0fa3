"""Attention over rows of several types as they lie in memory (`latent_rows`): Hopper's kernels read a cache
as two or three inputs, numbers of e4m3, their scales, and the rotary columns behind them, if any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from attnc.adapters.latent_rows import FORMATS, RowFormat, split_rows
from attnc.api.compile import compile_family
from attnc.api.fastest import HOPPER, chosen_target, index_of, targets_on

#: The rows that kernels read where lists name them, and how many columns are values.
LISTED, VALUES = FORMATS[656], 512


def reads_rows(
    function: str, q: torch.Tensor, cache: torch.Tensor, form: RowFormat, width: int, *, listed: bool = False
) -> bool:
    """Returns whether a kernel reads the rows of a cache [pages, page, 1, bytes], for values of so many
    columns. function: what a warning calls the caller; listed: lists name rows, which lie at one distance.
    """
    if (listed and form is not LISTED) or width != VALUES or not cache.numel() or not q.numel():
        return False
    if cache.stride(0) % 16 or cache.storage_offset() % 16:
        return False
    return targets_on(function, index_of(q), "16 bits", chosen_target())[0] == HOPPER


def follow_each_other(cache: torch.Tensor) -> bool:
    """Returns whether pages do, so that a number says where a row lies."""
    return cache.shape[0] == 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)


def attend_listed(
    q: torch.Tensor, cache: torch.Tensor, lists: torch.Tensor, counts: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (o [B, M, H, 512], lse [B, M, H]) of q [B, M, H, 576] over the rows in lists [B, M, n], of
    which counts [B, M] count: page * size + row of pages that follow each other.
    """
    rows = cache.shape[0] * cache.shape[1]
    parts = split_rows(cache, LISTED)
    held = (x.view(1, rows, *x.shape[2:]).expand(len(q), rows, *x.shape[2:]) for x in parts)
    made = compile_rows(listed_text(scale, is_wide=lists.dtype == torch.int64))
    o, lse = made(q, *held, lists, counts)
    return o, lse


def attend_pages(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    form: RowFormat,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same of q [B, M, H, columns] over all rows of the pages in block_table [B, P], of which
    lengths [B] exist. form: of the cache's rows.
    """
    made = compile_rows(paged_text(scale, form, page=cache.shape[1], causal=causal))
    o, lse = made(q, *split_rows(cache, form), block_table, lengths)
    return o, lse


def listed_text(scale: float, *, is_wide: bool) -> str:
    """Returns the spec for lists, of i64 or i32."""
    dtype, mask = "i64" if is_wide else "i32", "listed(indices[b, q_idx], keys = 1, count = count[b, q_idx])"
    inputs = (f"indices: {dtype}[B, M, S]", "count: i32[B, M]")
    return _text("sparse_latent_rows", LISTED, scale, "", "B, N", "b, kv_idx", inputs, mask)


def paged_text(scale: float, form: RowFormat, *, page: int, causal: bool) -> str:
    """Returns the spec for pages of so many rows of this format."""
    via, row = f" via paged(block_table, page = {page})", f"block_table[b, kv_idx // {page}], kv_idx % {page}"
    inputs = ("block_table: i32[B, P]", "kv_len: i32[B]")
    mask = "causal" if causal else "true"
    return _text("latent_rows", form, scale, via, f"R, {page}", row, inputs, mask)


def _text(
    name: str,
    form: RowFormat,
    scale: float,
    via: str,
    axes: str,
    row: str,
    inputs: tuple[str, ...],
    mask: str,
) -> str:
    stored, of_columns = "f32", f"scale[{row}, d // {form.block}]"
    if form.scales_pages:
        stored, of_columns = "u8", f"exp2({of_columns} - 127)"
    reaches = form.narrow < VALUES  # values are keys as products have them
    keys = f"k * {of_columns}"
    lines = (
        f"input q: bf16[B, M, G, {form.columns}]",
        f"input k: e4m3[B, N, 1, {form.narrow}]{via}",
        f"input v: {'bf16' if reaches else 'e4m3'}[B, N, 1, {VALUES}] via prefix(k)",
        f"input scale: {stored}[{axes}, {form.scales}]",
        *([f"input rope: bf16[{axes}, {form.rotary}]"] if form.rotary else []),
        *(f"input {declared}" for declared in inputs),
        *(["length N = kv_len[b]"] if via else []),
        f"score = dot(q, {f'cat({keys}, rope[{row}, d])' if form.rotary else keys}) * {scale!r}",
        f"mask = {mask}",
        f"normalize = softmax{'' if reaches else f'(v_scale = {of_columns})'}",
        f"output o: bf16[B, M, G, {VALUES}]",
        "output lse: f32[B, M, G]",
    )
    body = "\n  ".join(lines)
    knobs = "loops = [kv], pack = gqa, tile.kv = 64\n  split.kv = auto"
    return f"attention {name} {{\n  {body}\n}}\n\nschedule {name} for {HOPPER} {{\n  {knobs}\n}}\n"


@lru_cache(maxsize=64)
def compile_rows(text: str) -> Callable[..., Any]:
    """Returns the function of a spec for Hopper."""
    return compile_family(text, target=HOPPER, warn=False).function
