"""Attention results over different keys of the same rows, joined into the result over all of these keys.

A result is a state: o, normalised, and lse, the natural logarithm of its denominator. Merging is associative
and commutative up to rounding, and the empty state (o = 0, lse = -inf) changes nothing. It is how a prefix
that sequences share is attended to once for all of them (cascade, `merge_states`), and how ranks that hold
parts of the keys agree (`join_ranks`, one kernel).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attnc.runtime.devices import on_device_of


def merge_states(
    o: torch.Tensor, lse: torch.Tensor, other_o: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (o, lse) over the keys of both states: the operator on attention states of FlashInfer (arXiv
    2501.01005), o = (w o + w' o') / (w + w') with w = exp(lse), w' = exp(lse').

    o, other_o: [..., Dv] of one dtype; lse, other_lse: float32 [...], in the same order of axes as the rows
    of o. The result has o's dtype, computed in float32 and rounded once. Merging two empty states is empty,
    without NaN, and what a state with lse = -inf has in o is not looked at. Runs on any device, under CUDA
    graphs and torch.compile.

    Raises ValueError or TypeError naming the argument, what was expected and what came.
    """
    _check(o, lse, other_o, other_lse)
    m = torch.maximum(lse, other_lse)
    shift = torch.where(m == float("-inf"), 0.0, m)  # -inf - -inf is NaN
    weight, other_weight = torch.exp(lse - shift), torch.exp(other_lse - shift)
    total = weight + other_weight
    scale = 1.0 / torch.where(total == 0.0, 1.0, total)
    merged = _weigh(o, weight * scale) + _weigh(other_o, other_weight * scale)
    return merged.to(o.dtype), m + torch.log(total)


def _weigh(o: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    share = weight[..., None]
    return torch.where(share == 0.0, 0.0, o.float() * share)


def _check(o: torch.Tensor, lse: torch.Tensor, other_o: torch.Tensor, other_lse: torch.Tensor) -> None:
    if other_o.shape != o.shape:
        raise ValueError(f"other_o: expected shape {list(o.shape)}, like o, got {list(other_o.shape)}")
    if other_o.dtype != o.dtype:
        raise TypeError(f"other_o: expected dtype {o.dtype}, like o, got {other_o.dtype}")
    for name, x in (("lse", lse), ("other_lse", other_lse)):
        if x.dtype != torch.float32:
            raise TypeError(f"{name}: expected dtype torch.float32, got {x.dtype}")
        if x.shape != o.shape[:-1]:
            raise ValueError(f"{name}: expected shape {list(o.shape[:-1])}, got {list(x.shape)}")


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _join(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    every_ptr, o_ptr, lse_ptr, stride_rank, stride_row,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


def join_ranks(every: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (o, lse) over the keys of all ranks, which are added rank by rank.

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
        with on_device_of(every):
            _join[(lse.numel(),)](every, o, lse, *strides, len(every), width, block, num_warps=1)
    return o, lse
