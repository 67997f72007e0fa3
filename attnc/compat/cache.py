"""Writing new keys and values into a cache in place, on the device: nothing waits for it."""

from __future__ import annotations

import torch


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
