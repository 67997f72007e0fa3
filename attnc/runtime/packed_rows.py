"""Reading rows that hold several types, as `adapters.latent_rows` describes them, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attnc.runtime.devices import on_device_of

#: Rows of a program.
_ROWS = 8


@triton.jit
def _of_e4m3(x):  # type: ignore[no-untyped-def]  # Triton has no types
    """Makes float32 of numbers of e4m3 by their bits, on any GPU: those of an f16 256 times as small."""
    most = x & 0x7F
    sign = ((x & 0x80).to(tl.int32) << 24).to(tl.uint32)
    size = (most.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    signed = (size.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(most == 0x7F, float("nan"), signed)


@triton.jit
def _of_e8m0(x):  # type: ignore[no-untyped-def]  # as above
    bits = tl.where(x == 0, 0x400000, x.to(tl.int32) << 23)
    return tl.where(x == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit(  # type: ignore[untyped-decorator]  # as above
    do_not_specialize=["count", "in_sequence", "most", "rows", "page", "made_rows", "first"]
)
def _unpack(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    bytes_ptr, floats_ptr, halves_ptr, listed_ptr, own_ptr, made_ptr,
    count, in_sequence, most, rows, page, page_stride, made_rows, first,
    NARROW: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr, PITCH: tl.constexpr,
    SCALE_BYTES: tl.constexpr, EXPONENTS: tl.constexpr, ROWS: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Writes what ROWS entries of lists stand for, and which of them counts."""
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = entry < count
    row = tl.load(listed_ptr + entry, mask=exists, other=-1).to(tl.int64)
    counts = exists & (row >= 0) & (row < rows)
    if ONCE:
        before = tl.load(listed_ptr + entry - 1, mask=exists & (entry % most != 0), other=-1).to(tl.int64)
        counts = counts & (row != before)
    number = first + entry % in_sequence
    tl.store(own_ptr + entry, tl.where(counts, number.to(tl.int32), -1), mask=exists)
    row = tl.where(counts, row, 0)
    of_page = row // page * page_stride
    place = of_page + row % page * PITCH
    to = (entry // in_sequence * made_rows + number) * (NARROW + ROTARY)
    for block in tl.static_range(NARROW // BLOCK):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(bytes_ptr + place[:, None] + at[None, :], mask=counts[:, None], other=0)
        if EXPONENTS:
            behind = of_page + page * PITCH + row % page * SCALE_BYTES if SCALE_BYTES > 0 else place + NARROW
            behind += block
            scale = _of_e8m0(tl.load(bytes_ptr + behind, mask=counts, other=0))
        else:
            scale = tl.load(floats_ptr + (place + NARROW) // 4 + block, mask=counts, other=0.0)
        made = (_of_e4m3(x) * scale[:, None]).to(tl.bfloat16)
        tl.store(made_ptr + to[:, None] + at[None, :], made, mask=counts[:, None])
    if ROTARY > 0:
        at = tl.arange(0, ROTARY)
        behind = NARROW if EXPONENTS else NARROW + NARROW // BLOCK * 4
        x = tl.load(
            halves_ptr + ((place + behind) // 2)[:, None] + at[None, :], mask=counts[:, None], other=0.0
        )
        tl.store(made_ptr + to[:, None] + NARROW + at[None, :], x, mask=counts[:, None])


def unpack_listed(
    cache: torch.Tensor,
    packing: tuple[int, int, int, int, int, bool],
    listed: torch.Tensor,
    made: torch.Tensor,
    *,
    first: int = 0,
    once: bool = True,
) -> torch.Tensor:
    """Writes what entry i of the M * n entries of a sequence stands for to row first + i of `made` [B, R,
    columns]; returns these numbers i32[B, M, n], and -1 for entries that do not count, beside which nothing
    is written.

    cache: [pages, page, 1, bytes] of u8, a page's rows one behind the other. packing: of a row the numbers of
    e4m3, how many share a scale, the numbers of bf16 behind them, bytes from row to row, how many bytes of
    scales it has behind the rows of its page, 0: they follow its numbers of e4m3; and whether scales are
    exponents of two, not f32. listed: i32 or i64 [B, M, n], contiguous: page * size + row; others say
    nothing. once: lists are sorted, and the first of equal entries alone counts.
    """
    own = torch.empty(listed.shape, dtype=torch.int32, device=cache.device)
    if listed.numel():
        with on_device_of(cache):
            _unpack[(triton.cdiv(listed.numel(), _ROWS),)](
                cache, cache.view(torch.float32), cache.view(torch.bfloat16), listed, own, made,
                listed.numel(), listed.shape[1] * listed.shape[2], listed.shape[2],
                cache.shape[0] * cache.shape[1], cache.shape[1],
                cache.stride(0), made.shape[1], first, *packing, _ROWS, once,
            )  # fmt: skip
    return own
