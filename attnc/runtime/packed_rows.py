"""Reading rows that hold several types, as `adapters.latent_rows` describes them, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Rows of a program.
_ROWS = 8


@triton.jit
def _of_e4m3(x):  # type: ignore[no-untyped-def]  # as above
    """Makes float32 of numbers of e4m3 by their bits, on any GPU: those of an f16 256 times as small."""
    most = x & 0x7F
    sign = ((x & 0x80).to(tl.int32) << 24).to(tl.uint32)
    size = (most.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    signed = (size.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(most == 0x7F, float("nan"), signed)


@triton.jit(do_not_specialize=["count", "lists", "most"])  # type: ignore[untyped-decorator]  # as above
def _unpack(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    bytes_ptr, floats_ptr, halves_ptr, listed_ptr, own_ptr, made_ptr, count, lists, most,
    NARROW: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr, PITCH: tl.constexpr,
    ROWS: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Writes what ROWS entries of lists stand for, and which of them counts. PITCH: bytes from row to row."""
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = entry < count
    row = tl.load(listed_ptr + entry, mask=exists, other=-1).to(tl.int64)
    counts = exists & (row >= 0)
    if ONCE:
        before = tl.load(listed_ptr + entry - 1, mask=exists & (entry % most != 0), other=-1).to(tl.int64)
        counts = counts & (row != before)
    tl.store(own_ptr + entry, tl.where(counts, (entry % (lists * most)).to(tl.int32), -1), mask=exists)
    row = tl.where(counts, row, 0)
    width: tl.constexpr = NARROW + ROTARY
    for block in tl.static_range(NARROW // BLOCK):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(bytes_ptr + row[:, None] * PITCH + at[None, :], mask=counts[:, None], other=0)
        scale = tl.load(floats_ptr + row * (PITCH // 4) + NARROW // 4 + block, mask=counts, other=0.0)
        made = (_of_e4m3(x) * scale[:, None]).to(tl.bfloat16)
        tl.store(made_ptr + entry[:, None] * width + at[None, :], made, mask=counts[:, None])
    at = tl.arange(0, ROTARY)
    place = row[:, None] * (PITCH // 2) + NARROW // 2 + NARROW // BLOCK * 2 + at[None, :]
    x = tl.load(halves_ptr + place, mask=counts[:, None], other=0.0)
    tl.store(made_ptr + entry[:, None] * width + NARROW + at[None, :], x, mask=counts[:, None])


def unpack_listed(
    rows: torch.Tensor, listed: torch.Tensor, narrow: int, block: int, *, once: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (made bf16[B, M, n, columns], own i32[B, M, n]): what each entry of a list stands for, and its
    number among the M * n of its sequence if it counts, else -1, where nothing is written.

    rows: u8[R, bytes], their stride a multiple of 4: `narrow` numbers of e4m3, a scale of f32 for each
    `block` of them, and numbers of bf16, which are not scaled. listed: i32 or i64 [B, M, n], contiguous:
    numbers of rows, less than 0 for none. once: lists are sorted, and the first of equal entries alone
    counts.
    """
    rotary = (rows.shape[-1] - narrow - narrow // block * 4) // 2
    made = torch.empty(*listed.shape, narrow + rotary, dtype=torch.bfloat16, device=rows.device)
    own = torch.empty(listed.shape, dtype=torch.int32, device=rows.device)
    if listed.numel():
        _unpack[(triton.cdiv(listed.numel(), _ROWS),)](
            rows, rows.view(torch.float32), rows.view(torch.bfloat16), listed, own, made,
            listed.numel(), *listed.shape[1:], narrow, block, rotary, rows.stride(0), _ROWS, once,
        )  # fmt: skip
    return made, own
