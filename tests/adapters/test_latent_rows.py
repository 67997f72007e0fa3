"""Rows of several types: what is packed comes back as close as 8 bits say, and goes to its slot."""

from __future__ import annotations

import struct

import pytest
import torch

from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

from attnc.adapters.latent_rows import pack_rows, store_rows, unpack_rows  # noqa: E402  # Triton's interpreter has to be chosen first
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
    with pytest.raises(ValueError, match="cache: expected rows of 656 bytes"):
        store_rows(latents(1), torch.zeros(1, 1, 1, 584, dtype=torch.uint8), torch.zeros(1).int())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_entries_of_lists_become_rows_of_their_own_and_equal_ones_the_first(dtype: torch.dtype) -> None:
    rows = pack_rows(latents(20))
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    rows[3, :256], rows[4, :256] = codes, codes.flip(0)
    rows[5, 512:516] = torch.tensor([torch.inf]).view(torch.uint8)
    lists = [[[-1, -1, 3, 4, 4, 5], [0, 0, 0, 1, 18, 19]], [[-1] * 6, [2, 3, 4, 5, 6, 7]]]
    listed = torch.tensor(lists, dtype=dtype)
    made, own = unpack_listed(rows, listed, 512, 128)
    assert own[0].tolist() == [[-1, -1, 2, 3, -1, 5], [6, -1, -1, 9, 10, 11]]
    assert own[1].tolist() == [[-1] * 6, [6, 7, 8, 9, 10, 11]]
    counts = own >= 0
    expected = unpack_rows(rows[listed[counts].long()])
    assert expected.isnan().any()
    torch.testing.assert_close(made[counts], expected, rtol=0, atol=0, equal_nan=True)
