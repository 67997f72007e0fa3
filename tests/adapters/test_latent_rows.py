"""Rows of several types: what is packed comes back as close as 8 bits say, and goes to its slot."""

from __future__ import annotations

import struct

import pytest
import torch

from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

from attnc.adapters.latent_rows import (  # noqa: E402  # Triton's interpreter has to be chosen first
    FORMATS,
    pack_rows,
    store_rows,
    unpack_cache,
    unpack_rows,
)
from attnc.runtime.packed_rows import unpack_listed  # noqa: E402  # as above


def latents(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([1e-3, 1.0, 300.0, 7.0]).repeat_interleave(128)
    return torch.randn(*shape, 576, generator=generator) * torch.cat([sizes, torch.ones(64)])


def test_a_row_is_512_numbers_of_8_bits_four_scales_and_64_numbers_of_16_bits() -> None:
    x = latents(1)[0]
    row = bytes(pack_rows(x).tolist())
    assert len(row) == 656
    scales = struct.unpack("<4f", row[512:528])
    for block, scale in enumerate(scales):
        largest = x[128 * block : 128 * (block + 1)].abs().max().item()
        assert scale == pytest.approx(largest / 448, rel=1e-6)
    rotary = torch.frombuffer(bytearray(row[528:]), dtype=torch.bfloat16)
    assert torch.equal(rotary, x[512:].bfloat16())


def test_what_a_row_stands_for_is_each_number_times_its_scale_rounded_once() -> None:
    rows = pack_rows(latents(3, 5))
    made = unpack_rows(rows)
    assert made.dtype is torch.bfloat16
    assert made.shape == (3, 5, 576)
    numbers = rows[..., :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[..., 512:528].contiguous().view(torch.float32).double().repeat_interleave(128, -1)
    assert torch.equal(made[..., :512], (numbers * scales).float().bfloat16())
    assert torch.equal(unpack_rows(rows.view(torch.float8_e4m3fn)), made)


def test_numbers_come_back_as_close_as_4_bits_say() -> None:
    x = latents(40)
    error = (unpack_rows(pack_rows(x))[:, :512].double() - x[:, :512].double()).abs()
    largest = x[:, :512].abs().view(-1, 4, 128).amax(-1).repeat_interleave(128, -1).double()
    assert (error <= x[:, :512].abs() * (2**-4 + 2**-8) + largest / 448 * 2**-9).all()


def test_blocks_of_zeros_stay_and_of_infinities_become_nan() -> None:
    x = latents(2)
    x[0, :128], x[1, 130] = 0.0, torch.inf
    made = unpack_rows(pack_rows(x))
    assert not made[0, :128].any()
    assert made[1, 128:256].isnan().all()
    assert made[1, :128].isfinite().all()
    assert made[1, 256:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_tokens_go_to_their_slots(dtype: torch.dtype) -> None:
    x, cache = latents(4).bfloat16(), torch.zeros(3, 4, 1, 656, dtype=torch.uint8)
    slots = [9, -1, 0, 7]
    store_rows(x, cache.view(dtype), torch.tensor(slots, dtype=torch.int32))
    rows, packed = cache.flatten(0, 2), pack_rows(x)
    for slot in range(12):
        assert torch.equal(
            rows[slot], packed[slots.index(slot)] if slot in slots else torch.zeros(656).byte()
        )


def test_other_rows_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"latents: expected shape \[..., 576\], got \[2, 512\]"):
        pack_rows(torch.zeros(2, 512))
    with pytest.raises(TypeError, match=r"latents: expected floats, got torch.int32"):
        pack_rows(torch.zeros(576, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"rows: expected torch.uint8 or torch.float8_e4m3fn"):
        unpack_rows(torch.zeros(656))
    with pytest.raises(ValueError, match=r"rows: expected shape \[..., 656\], got \[2, 528\]"):
        unpack_rows(torch.zeros(2, 528, dtype=torch.uint8))
    slots, cache = torch.zeros(1).int(), torch.zeros(2, 4, 1, 584, dtype=torch.uint8)
    with pytest.raises(ValueError, match="cache: expected rows of 656, 584, 528 bytes"):
        store_rows(latents(1), cache[..., 1:], slots)
    with pytest.raises(ValueError, match=r"latents: expected shape \[..., 512\], got \[1, 576\]"):
        store_rows(latents(1), cache, slots)
    with pytest.raises(ValueError, match=r"cache: expected shape \[pages, page, 1, 584\]"):
        unpack_cache(cache[0])
    with pytest.raises(ValueError, match="cache: expected rows that follow each other in memory"):
        store_rows(latents(1)[:, :512], cache.transpose(0, 1), slots)
    memory, page = torch.zeros(20_000, dtype=torch.uint8), 4 * 584
    store_rows(latents(1)[:, :512], memory.as_strided((2, 4, 1, 584), (page + 4, 584, 1, 1)), slots)
    for strides in ((page + 8, 592, 584, 1), (2 * page, 584, 584, 2), (page + 2, 584, 584, 1)):
        with pytest.raises(ValueError, match="cache: expected rows that follow each other in memory"):
            store_rows(latents(1)[:, :512], memory.as_strided((2, 4, 1, 584), strides), slots)


def filled(size: int, pages: int = 3, page: int = 4, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of rows of so many bytes in every slot, in pages with a gap between them, and its latents."""
    columns = FORMATS[size].columns
    memory = torch.full((pages, page * size + 32), 0xA5, dtype=torch.uint8)
    cache = memory[:, : page * size].view(pages, page, 1, size)
    x = latents(pages * page, seed=seed)[:, :columns]
    store_rows(x, cache, torch.arange(pages * page))
    assert (memory[:, page * size :] == 0xA5).all()
    return cache, x


@pytest.mark.parametrize("size", list(FORMATS))
def test_every_format_holds_what_it_is_given(size: int) -> None:
    form = FORMATS[size]
    cache, x = filled(size)
    made = unpack_cache(cache)
    assert made.shape == (3, 4, 1, form.columns)
    assert torch.equal(unpack_cache(cache.view(torch.float8_e4m3fn)), made)
    found = made.flatten(0, 2)
    assert torch.equal(found[:, form.narrow :], x[:, form.narrow :].bfloat16())
    blocks = x[:, : form.narrow].double().reshape(12, form.scales, form.block)
    error = (found[:, : form.narrow].double().reshape_as(blocks) - blocks).abs()
    largest = blocks.abs().amax(-1, keepdim=True) * (2 if form.exponents else 1)
    assert (error <= blocks.abs() * (2**-4 + 2**-8) + largest / 448 * 2**-9).all()


@pytest.mark.parametrize(
    ("size", "pitch", "first", "step", "scales"), [(584, 576, 4 * 576, 8, 7), (528, 528, 512, 528, 16)]
)
def test_exponents_of_two_lie_behind_a_page_or_in_its_rows(
    size: int, pitch: int, first: int, step: int, scales: int
) -> None:
    """first, step: where those of the rows of a page begin, and the way from row to row."""
    x = torch.zeros(8, FORMATS[size].columns)
    x[5, 0], x[5, 70] = 448.0, 449.0  # exactly the most, and a little more than it
    cache = torch.zeros(2, 4, 1, size, dtype=torch.uint8)
    store_rows(x, cache, torch.arange(8))
    page = bytes(cache[1].flatten().tolist())
    own = page[first + step :][:scales]  # of row 1 of the page
    assert own[0] == 127
    assert own[70 // FORMATS[size].block] == 128
    assert set(page[first:][:scales]) == {127}
    assert page[pitch] == 0x7E  # 448
    assert page[pitch + 70] == 0x76  # 224.5 is 224


def test_scales_of_exponents_may_be_extreme() -> None:
    x = torch.zeros(4, 512)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 1e-45, 3e38, torch.inf, torch.nan
    cache = torch.zeros(1, 4, 1, 528, dtype=torch.uint8)
    store_rows(x, cache, torch.arange(4))
    made = unpack_cache(cache)[0, :, 0]
    assert made[0].isfinite().all()
    torch.testing.assert_close(made[1, 0].float(), torch.tensor(3e38), rtol=0.07, atol=0)
    assert made[2:, :32].isnan().all()
    assert made[:, 32:].isfinite().all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", list(FORMATS))
def test_entries_of_lists_become_rows_of_their_own_and_equal_ones_the_first(
    dtype: torch.dtype, size: int
) -> None:
    form = FORMATS[size]
    cache, _ = filled(size, 5, 4)
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    pages = cache.view(5, -1)
    pages[0, 3 * form.pitch : 3 * form.pitch + 256] = codes  # NaN, subnormal numbers and all others
    at = 4 * form.pitch if form.scales_pages else form.narrow
    pages[1, at : at + 4] = torch.tensor([2, 255, 1, 254], dtype=torch.uint8)  # scales
    lists = [[[-1, -1, 3, 4, 4, 5], [0, 0, 0, 1, 18, 19]], [[-1] * 6, [2, 3, 4, 5, 6, 7]]]
    listed = torch.tensor(lists, dtype=dtype)
    made = torch.zeros(2, 20, form.columns, dtype=torch.bfloat16)
    own = unpack_listed(cache, form.packing, listed, made, first=3)
    assert own[0].tolist() == [[-1, -1, 5, 6, -1, 8], [9, -1, -1, 12, 13, 14]]
    assert own[1].tolist() == [[-1] * 6, [9, 10, 11, 12, 13, 14]]
    expected = unpack_cache(cache).flatten(0, 2)
    assert expected.isnan().any()
    for b in range(2):
        counts = own[b] >= 0
        found = made[b, own[b][counts].long()]
        torch.testing.assert_close(found, expected[listed[b][counts].long()], rtol=0, atol=0, equal_nan=True)
        untouched = torch.ones(20, dtype=torch.bool)
        untouched[own[b][counts].long()] = False
        assert not made[b, untouched].any()
