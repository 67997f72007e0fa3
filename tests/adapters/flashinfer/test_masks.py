"""Packed masks are those of numpy."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from attnc.adapters.flashinfer import packbits, segment_packbits


@pytest.mark.parametrize("order", ["big", "little"])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 40])
def test_bits_are_numpys(order: str, size: int) -> None:
    x, numpys = torch.rand(size) < 0.5, cast(Any, order)
    assert packbits(x, order).tolist() == np.packbits(x.numpy(), bitorder=numpys).tolist()


@pytest.mark.parametrize("order", ["big", "little"])
def test_segments_begin_at_bytes(order: str) -> None:
    x = torch.rand(23) < 0.5
    packed, begins = segment_packbits(x, torch.tensor([0, 4, 4, 20, 23], dtype=torch.int32), order)
    assert (begins.tolist(), begins.dtype) == ([0, 1, 1, 3, 4], torch.int32)
    parts = [packbits(part, order) for part in (x[:4], x[4:20], x[20:])]
    assert packed.tolist() == torch.cat(parts).tolist()
    nothing, ends = segment_packbits(x[:0], torch.tensor([0]), order)
    assert (nothing.dtype, ends.tolist()) == (torch.uint8, [0])


def test_orders_have_names() -> None:
    with pytest.raises(ValueError, match="bitorder: expected 'big' or 'little', got 'small'"):
        packbits(torch.ones(3).bool(), "small")
