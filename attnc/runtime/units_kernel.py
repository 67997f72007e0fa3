"""The kernel of `attnc.runtime.units`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from attnc.runtime.devices import on_device_of


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _collect(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    out_ptr, into_ptr, at_ptr, a_ptr, b_ptr, c_ptr, d_ptr, units,
    UNIT: tl.constexpr, STEP: tl.constexpr, TERMS: tl.constexpr, SCATTERS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    exists = row < units
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for term in tl.static_range(TERMS):
        at = tl.load(at_ptr + term * units + row, mask=exists, other=-1)
        source, kept = at % 4, (at >= 0)[:, None] & (d < UNIT)[None, :]
        x_ptr = tl.where(source < 2, tl.where(source == 0, a_ptr, b_ptr), tl.where(source == 2, c_ptr, d_ptr))
        x = tl.load(x_ptr[:, None] + ((at // 4) * STEP)[:, None] + d[None, :], mask=kept, other=0.0)
        total = total + x.to(tl.float32) if TERMS > 1 else x
    if SCATTERS:
        first = tl.load(into_ptr + row, mask=exists, other=0) * STEP
    else:
        first = row * UNIT
    stored = exists[:, None] & (d < UNIT)[None, :]
    tl.store(out_ptr + first[:, None] + d[None, :], total.to(out_ptr.dtype.element_ty), mask=stored)


def launch(
    out: torch.Tensor, at: torch.Tensor, into: torch.Tensor | None, unit: int, step: int,
    sources: Sequence[torch.Tensor], tile: int,
) -> None:  # fmt: skip
    terms, units = at.shape
    block = triton.next_power_of_2(unit)
    rows = max(tile // block, 1)
    with on_device_of(out):
        _collect[(triton.cdiv(units, rows),)](
            out, at if into is None else into, at, *sources, units,
            unit, step, terms, into is not None, rows, block, num_warps=4,
        )  # fmt: skip
