"""Rows of latent attention that hold several types, as caches of DeepSeek-V3.2 and FlashMLA keep them.

A row has 656 bytes: 512 numbers of e4m3, four scales of f32, each of 128 of these numbers, and 64 numbers of
bf16, the rotary part. What a row stands for is 576 numbers of bf16: `float32(number) * scale`, rounded once,
and the rotary part as it is. Kernels take those.
"""

from __future__ import annotations

import torch

#: Bytes of a row; its numbers of 8 bits, of each scale, and of 16 bits.
ROW_BYTES = 656
NARROW, BLOCK, ROTARY = 512, 128, 64
LATENT = NARROW + ROTARY
_SCALES = NARROW // BLOCK
_SCALES_END = NARROW + 4 * _SCALES
_MOST = torch.finfo(torch.float8_e4m3fn).max


def pack_rows(latents: torch.Tensor) -> torch.Tensor:
    """Returns rows u8[..., 656] of latents [..., 576], of any float type.

    The scale of a block is its largest magnitude / 448, and 1 where that is 0; numbers are divided by it in
    float32 and rounded to nearest. A block with an infinity or NaN becomes NaN. The rotary part is rounded to
    bf16. Raises TypeError or ValueError for other latents.
    """
    if not latents.is_floating_point():
        raise TypeError(f"latents: expected floats, got {latents.dtype}")
    if not latents.dim() or latents.shape[-1] != LATENT:
        raise ValueError(f"latents: expected shape [..., {LATENT}], got {list(latents.shape)}")
    blocks = latents[..., :NARROW].float().reshape(*latents.shape[:-1], _SCALES, BLOCK)
    scales = blocks.abs().amax(-1) / _MOST
    scales = torch.where(scales == 0, 1.0, scales)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    narrow = (blocks / scales[..., None]).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn).flatten(-2)
    rotary = latents[..., NARROW:].to(torch.bfloat16).contiguous()
    return torch.cat([x.contiguous().view(torch.uint8) for x in (narrow, scales, rotary)], -1)


def unpack_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the latents bf16[..., 576] that rows [..., 656] of u8 or e4m3 stand for. Raises TypeError or
    ValueError for other rows.
    """
    check_rows("rows", rows)
    held = rows.contiguous().view(torch.uint8)
    narrow = held[..., :NARROW].view(torch.float8_e4m3fn).float().view(*rows.shape[:-1], _SCALES, BLOCK)
    scales = held[..., NARROW:_SCALES_END].contiguous().view(torch.float32)
    rotary = held[..., _SCALES_END:].contiguous().view(torch.bfloat16)
    return torch.cat([(narrow * scales[..., None]).flatten(-2).to(torch.bfloat16), rotary], -1)


def store_rows(latents: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Packs latents [T, 576] and writes token t to row slots[t] % page of page slots[t] // page of a cache
    u8[pages, page, 1, 656].

    slots: i32 or i64 [at most T], negative for tokens that go nowhere. Nothing waits for the device. Raises
    TypeError or ValueError with the name of an argument.
    """
    from attnc.runtime.slots import store  # brings Triton, which reading rows needs not

    check_rows("cache", cache)
    held = cache.view(torch.uint8)
    rows = pack_rows(latents)[:, None]
    store(rows[..., :NARROW], rows[..., NARROW:], held[..., :NARROW], held[..., NARROW:], slots)


def check_rows(name: str, rows: torch.Tensor) -> None:
    """Raises TypeError or ValueError for what has no rows of 656 bytes."""
    if rows.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise TypeError(f"{name}: expected torch.uint8 or torch.float8_e4m3fn, got {rows.dtype}")
    if not rows.dim() or rows.shape[-1] != ROW_BYTES:
        raise ValueError(f"{name}: expected rows of {ROW_BYTES} bytes, got shape {list(rows.shape)}")
