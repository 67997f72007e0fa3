"""Partial results over the keys of several ranks, joined by one kernel: what `merge` does for two states."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _join(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    every_ptr, o_ptr, lse_ptr, stride_rank, stride_row,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r joins row r."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    own = every_ptr + row * stride_row
    top = tl.load(own + WIDTH)
    for rank in tl.static_range(1, RANKS):
        top = tl.maximum(top, tl.load(own + rank * stride_rank + WIDTH))
    shift = tl.where(top == -float("inf"), 0.0, top)  # -inf - -inf is NaN
    total = 0.0
    acc = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        at = own + rank * stride_rank
        weight = tl.exp(tl.load(at + WIDTH) - shift)
        total += weight
        acc += tl.where(weight == 0.0, 0.0, weight * tl.load(at + d, mask=d < WIDTH, other=0.0))
    o = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(o_ptr + row * WIDTH + d, o.to(o_ptr.dtype.element_ty), mask=d < WIDTH)
    tl.store(lse_ptr + row, shift + tl.log(total))


def joined(every: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) over the keys of all ranks, which are added rank by rank.

    every: f32[ranks, rows..., width + more], contiguous: o of each rank, normalised, and in column `width`
    its natural lse. Returns o, [rows..., width] of this dtype, and lse, f32[rows...]. A row that no rank has
    keys for is 0, and its lse -inf; what a rank without a key has in o is not looked at.
    """
    rows = every.shape[1:-1]
    o = torch.empty(*rows, width, dtype=dtype, device=every.device)
    lse = torch.empty(rows, dtype=torch.float32, device=every.device)
    if lse.numel():
        block = triton.next_power_of_2(width)
        strides = every.stride(0), every.shape[-1]
        _join[(lse.numel(),)](every, o, lse, *strides, len(every), width, block, num_warps=1)
    return o, lse
