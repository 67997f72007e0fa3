"""Attention over rows of several types as they lie in memory (`latent_rows`): Hopper's kernels read a cache
as two or three inputs, numbers of e4m3, their scales, and the rotary columns behind them, if any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from attnc.adapters.latent_rows import RowFormat, split_rows
from attnc.api.compile import compile_family
from attnc.api.fastest import HOPPER, chosen_target, index_of, targets_on

#: How many columns of the rows that kernels read are values.
VALUES = 512


def reads_rows(function: str, q: torch.Tensor, cache: torch.Tensor, width: int) -> bool:
    """Returns whether a kernel reads the rows of a cache [pages, page, 1, bytes], for values of so many
    columns. function: what a warning calls the caller.
    """
    if width != VALUES or not cache.numel() or not q.numel():
        return False
    if cache.stride(0) % 16 or cache.storage_offset() % 16:
        return False
    return targets_on(function, index_of(q), "16 bits", chosen_target())[0] == HOPPER


def _follow_each_other(cache: torch.Tensor, form: RowFormat) -> bool:
    """Returns whether all rows lie at one distance from page to page, so that a number says where one is."""
    is_even = cache.shape[0] == 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)
    return is_even and not form.scales_pages


def attend_listed(
    q: torch.Tensor,
    cache: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    form: RowFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (o [B, M, H, 512], lse [B, M, H]) of q [B, M, H, columns] over the rows in lists [B, M, n], of
    which counts [B, M] count: page * size + row. form: of the cache's rows.
    """
    pages, page = cache.shape[:2]
    is_wide, parts = lists.dtype == torch.int64, split_rows(cache, form)
    if _follow_each_other(cache, form):
        rows = pages * page
        held = (x.view(1, rows, *x.shape[2:]).expand(len(q), rows, *x.shape[2:]) for x in parts)
        made = compile_rows(listed_text(scale, form, is_wide=is_wide))
        o, lse = made(q, *held, lists, counts)
        return o, lse
    every = torch.arange(pages, dtype=torch.int32, device=q.device).expand(len(q), pages)
    made = compile_rows(listed_text(scale, form, page=page, is_wide=is_wide))
    o, lse = made(q, *parts, every, lists, counts)
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


def listed_text(scale: float, form: RowFormat, *, page: int = 0, is_wide: bool) -> str:
    """Returns the spec for lists, of i64 or i32. page: rows of a page, 0 where all rows lie at one distance;
    else a table of all pages says where those of a list are.
    """
    dtype, mask = "i64" if is_wide else "i32", "listed(indices[b, q_idx], keys = 1, count = count[b, q_idx])"
    inputs: tuple[str, ...] = (f"indices: {dtype}[B, M, S]", "count: i32[B, M]")
    if not page:
        return _text("sparse_latent_rows", form, scale, "", "B, N", "b, kv_idx", inputs, mask)
    via, row = _in_pages(page)
    inputs = ("block_table: i32[B, P]", *inputs)
    return _text("sparse_latent_pages", form, scale, via, f"R, {page}", row, inputs, mask, f"P * {page}")


def _in_pages(page: int) -> tuple[str, str]:
    """Returns how keys are stored in pages of so many rows, and the page and the place of a key."""
    row = f"block_table[b, kv_idx // {page}], kv_idx % {page}"
    return f" via paged(block_table, page = {page})", row


def paged_text(scale: float, form: RowFormat, *, page: int, causal: bool) -> str:
    """Returns the spec for pages of so many rows of this format."""
    via, row = _in_pages(page)
    inputs = ("block_table: i32[B, P]", "kv_len: i32[B]")
    mask = "causal" if causal else "true"
    return _text("latent_rows", form, scale, via, f"R, {page}", row, inputs, mask, "kv_len[b]")


def _text(
    name: str,
    form: RowFormat,
    scale: float,
    via: str,
    axes: str,
    row: str,
    inputs: tuple[str, ...],
    mask: str,
    length: str = "",
) -> str:
    stored, of_columns = "f32", f"scale[{row}, d // {form.block}]"
    if form.exponents:
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
        *([f"length N = {length}"] if length else []),
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
