"""Rows of latent attention that hold several types, as caches of DeepSeek's models and FlashMLA keep them.

A row stands for numbers of bf16: those of e4m3 times the scale of their block, in float32, rounded once; and
the rotary part, of bf16, as it is. What bytes it has follows from their number (`FORMATS`):

bytes | numbers of e4m3 | of each scale | of bf16 | scales
656   | 512             | 128           | 64      | four of f32 between the two (DeepSeek-V3.2)
584   | 448             | 64            | 64      | seven exponents of two, and a byte that says nothing (V4)
528   | 512             | 32            | 0       | sixteen exponents of two behind them (V4.1)

Exponents of two are bytes of `torch.float8_e8m0fnu`. Those of 584 bytes lie together behind the numbers of
all rows of a page, so a page is more than its rows, and what follows it in memory begins at its stride. Those
of 528 bytes lie in the row, as FlashMLA has them since September 2026; before, they lay behind a page, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_MOST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """What a row holds. bytes: of it; narrow: numbers of e4m3; block: how many share a scale; rotary: numbers
    of bf16; exponents: scales are exponents of two, of a byte each, not f32; scales_pages: they lie behind
    the rows of a page, not behind the numbers of e4m3.
    """

    bytes: int
    narrow: int
    block: int
    rotary: int
    exponents: bool
    scales_pages: bool

    @property
    def columns(self) -> int:
        return self.narrow + self.rotary

    @property
    def scales(self) -> int:
        return self.narrow // self.block

    @property
    def pitch(self) -> int:
        """Bytes from row to row of a page."""
        return self.narrow + 2 * self.rotary if self.scales_pages else self.bytes

    @property
    def scale_bytes(self) -> int:
        """Of the scales in a row."""
        return self.scales * (1 if self.exponents else 4)

    @property
    def packing(self) -> tuple[int, int, int, int, int, bool]:
        return self.narrow, self.block, self.rotary, self.pitch, self.bytes - self.pitch, self.exponents


_OF_F32 = RowFormat(bytes=656, narrow=512, block=128, rotary=64, exponents=False, scales_pages=False)
#: Formats by the bytes of a row.
FORMATS: Mapping[int, RowFormat] = {
    form.bytes: form
    for form in (
        _OF_F32,
        RowFormat(bytes=584, narrow=448, block=64, rotary=64, exponents=True, scales_pages=True),
        RowFormat(bytes=528, narrow=512, block=32, rotary=0, exponents=True, scales_pages=False),
    )
}


def pack_rows(latents: torch.Tensor) -> torch.Tensor:
    """Returns rows u8[..., 656] of latents [..., 576], of any float type.

    The scale of a block is its largest magnitude / 448, and 1 where that is 0; numbers are divided by it in
    float32 and rounded to nearest. A block with an infinity or NaN becomes NaN. The rotary part is rounded to
    bf16. Raises TypeError or ValueError for other latents.
    """
    narrow, scales, rotary = _pack(latents, _OF_F32)
    return torch.cat([narrow, scales, rotary], -1)


def unpack_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the latents bf16[..., 576] that rows [..., 656] of u8 or e4m3 stand for. Raises TypeError or
    ValueError for other rows.
    """
    if format_of("rows", rows) is not _OF_F32:
        raise ValueError(f"rows: expected shape [..., {_OF_F32.bytes}], got {list(rows.shape)}")
    return _unpack(*_cut(rows.contiguous().view(torch.uint8), _OF_F32), _OF_F32)


def unpack_cache(cache: torch.Tensor) -> torch.Tensor:
    """Returns the latents bf16[pages, page, 1, columns] that a cache [pages, page, 1, bytes] of u8 or e4m3
    stands for. Raises TypeError or ValueError for other caches.
    """
    form = _format_of_cache(cache)
    if not form.scales_pages:
        return _unpack(*_cut(cache.view(torch.uint8), form), form)
    data, scales = _regions(cache, form)
    return _unpack(data[..., : form.narrow], scales[..., : form.scales], data[..., form.narrow :], form)


def store_rows(latents: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Packs latents [T, columns] and writes token t to row slots[t] % page of page slots[t] // page of a
    cache [pages, page, 1, bytes] of u8 or e4m3, in the format of so many bytes.

    slots: i32 or i64 [at most T], negative for tokens that go nowhere. Scales that are exponents of two are
    the least that leave no number above 448; others are as `pack_rows` says. Nothing waits for the device.
    Raises TypeError or ValueError with the name of an argument.
    """
    from attnc.runtime.slots import store  # brings Triton, which reading rows needs not

    form = _format_of_cache(cache)
    narrow, scales, rotary = _pack(latents, form)
    if form.scales_pages:
        scales = torch.nn.functional.pad(scales, (0, form.bytes - form.pitch - form.scales))
        rows, rest = torch.cat([narrow, rotary], -1), scales
        to, beside = _regions(cache, form)
    else:
        held = cache.view(torch.uint8)
        rows, rest = narrow, torch.cat([scales, rotary], -1)
        to, beside = held[..., : form.narrow], held[..., form.narrow :]
    store(rows[:, None], rest[:, None], to, beside, slots)


def split_rows(cache: torch.Tensor, form: RowFormat) -> tuple[torch.Tensor, ...]:
    """Returns views of a cache [pages, page, 1, bytes] of u8 or e4m3: numbers e4m3[pages, page, 1, narrow],
    scales f32 or u8[pages, page, scales] and, if there are any, rotary columns bf16[pages, page, rotary].
    """
    if form.scales_pages:
        rows, beside = _regions(cache, form)
        scales, rotary = beside[..., 0, : form.scales], rows[..., 0, form.narrow :]
    else:
        rows, scales, rotary = (x[..., 0, :] for x in _cut(cache.view(torch.uint8), form))
        rows, scales = rows[..., None, :], scales if form.exponents else scales.view(torch.float32)
    numbers = rows[..., : form.narrow].view(torch.float8_e4m3fn)
    return numbers, scales, *([rotary.view(torch.bfloat16)] if form.rotary else [])


def format_of(name: str, rows: torch.Tensor) -> RowFormat:
    """Returns the format of rows. Raises TypeError or ValueError for what has none."""
    if rows.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise TypeError(f"{name}: expected torch.uint8 or torch.float8_e4m3fn, got {rows.dtype}")
    if not rows.dim() or rows.shape[-1] not in FORMATS:
        sizes = ", ".join(map(str, FORMATS))
        raise ValueError(f"{name}: expected rows of {sizes} bytes, got shape {list(rows.shape)}")
    return FORMATS[rows.shape[-1]]


def _format_of_cache(cache: torch.Tensor) -> RowFormat:
    form = format_of("cache", cache)
    if cache.dim() != 4 or cache.shape[2] != 1:
        raise ValueError(f"cache: expected shape [pages, page, 1, {form.bytes}], got {list(cache.shape)}")
    if form.scales_pages:
        check_pages("cache", cache, form)
    return form


def check_pages(name: str, cache: torch.Tensor, form: RowFormat) -> None:
    """Raises ValueError for a cache whose pages do not hold rows one behind the other."""
    if cache.stride(1) != form.bytes or cache.stride(3) != 1 or cache.stride(0) % 4:
        message = f"expected rows that follow each other in memory, got strides {cache.stride()}"
        raise ValueError(f"{name}: {message}")


def _regions(cache: torch.Tensor, form: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of a cache: the numbers of its rows [pages, page, 1, pitch], and their scales."""
    held = cache.view(torch.uint8)
    pages, page, step = held.shape[0], held.shape[1], held.stride(0)
    size, first = form.bytes - form.pitch, held.storage_offset()
    data = held.as_strided((pages, page, 1, form.pitch), (step, form.pitch, form.pitch, 1), first)
    at = first + page * form.pitch
    return data, held.as_strided((pages, page, 1, size), (step, size, size, 1), at)


def _cut(rows: torch.Tensor, form: RowFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns views of rows u8[..., bytes] that hold their scales: numbers, scales and the rotary part."""
    end = form.narrow + form.scale_bytes
    return rows[..., : form.narrow], rows[..., form.narrow : end], rows[..., end:]


def _pack(latents: torch.Tensor, form: RowFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the bytes of the numbers of e4m3, of their scales and of the rotary part."""
    if not latents.is_floating_point():
        raise TypeError(f"latents: expected floats, got {latents.dtype}")
    if not latents.dim() or latents.shape[-1] != form.columns:
        raise ValueError(f"latents: expected shape [..., {form.columns}], got {list(latents.shape)}")
    blocks = latents[..., : form.narrow].float().reshape(*latents.shape[:-1], form.scales, form.block)
    least = blocks.abs().amax(-1) / _MOST
    if form.exponents:
        size, exponent = torch.frexp(least)
        exponent = (exponent - (size == 0.5).int()).clamp(-126, 127)
        exponent = torch.where(least == 0, 0, exponent) + 127
        stored = torch.where(least.isfinite(), exponent, 255).to(torch.uint8)
        scales = _decode_exponents(stored)
    else:
        scales = torch.where(least == 0, 1.0, least)
        stored = scales = torch.where(scales.isfinite(), scales, torch.nan)
    narrow = (blocks / scales[..., None]).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn).flatten(-2)
    rotary = latents[..., form.narrow :].to(torch.bfloat16).contiguous()
    return narrow.view(torch.uint8), stored.contiguous().view(torch.uint8), rotary.view(torch.uint8)


def _unpack(
    narrow: torch.Tensor, scales: torch.Tensor, rotary: torch.Tensor, form: RowFormat
) -> torch.Tensor:
    numbers = narrow.contiguous().view(torch.float8_e4m3fn).float()
    held = scales.contiguous()
    factors = _decode_exponents(held) if form.exponents else held.view(torch.float32)
    blocks = numbers.view(*narrow.shape[:-1], form.scales, form.block)
    made = (blocks * factors[..., None]).flatten(-2).to(torch.bfloat16)
    return torch.cat([made, rotary.contiguous().view(torch.bfloat16)], -1)


def _decode_exponents(stored: torch.Tensor) -> torch.Tensor:
    """Returns the powers of two f32 that bytes of e8m0 stand for: 255 is NaN."""
    bits = torch.where(stored == 0, 1 << 22, stored.int() << 23)  # 2^-127 is a subnormal number
    return torch.where(stored == 255, torch.nan, bits.view(torch.float32))
