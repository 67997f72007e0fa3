"""Custom masks: a boolean for each query and key of a request, flat, as they are or packed into bits."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Packs booleans [n] into u8[ceil(n / 8)], as numpy.packbits does; "little": the first is the lowest."""
    _check_order(bitorder)
    bits = torch.nn.functional.pad(x.bool(), (0, -len(x) % 8)).view(-1, 8)
    shifts = torch.arange(8, device=x.device)
    shifts = shifts if bitorder == "little" else 7 - shifts
    return (bits.to(torch.int32) << shifts).sum(1).to(torch.uint8)


def segment_packbits(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs segments of booleans, x[indptr[i] : indptr[i + 1]], each from a byte of its own. Returns the
    bytes, and where those of each segment begin, in the type of indptr.
    """
    _check_order(bitorder)
    ends = indptr.tolist()
    packed = [packbits(x[first:last], bitorder) for first, last in pairwise(ends)]
    begins = torch.tensor([0, *accumulate(map(len, packed))], dtype=indptr.dtype, device=indptr.device)
    return torch.cat(packed) if packed else x.new_empty(0, dtype=torch.uint8), begins


def _check_order(bitorder: str) -> None:
    if bitorder not in ("big", "little"):
        raise ValueError(f"bitorder: expected 'big' or 'little', got {bitorder!r}")


def flatten_mask(
    rows: list[int],
    keys: list[int],
    custom: torch.Tensor | None,
    packed: torch.Tensor | None,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Returns what kernels read, or nothing without a mask: `custom_mask`: u8, eight elements each, the first
    in the lowest bit, and `mask_start`: i64[B], the byte with which a request begins.

    rows, keys: of each request. custom: bool[sum of rows * keys]; packed: u8, the lowest bit first, the bits
    of a request from a byte of its own (`segment_packbits`), which counts where both are given. TypeError and
    ValueError name the argument.
    """
    if custom is None and packed is None:
        return {}
    sizes = [m * n for m, n in zip(rows, keys, strict=True)]
    widths = [-(-size // 8) for size in sizes]
    if packed is not None:
        _check("packed_custom_mask", packed, (torch.uint8,), sum(widths))
        flat = packed.flatten().to(device)
    else:
        assert custom is not None
        _check("custom_mask", custom, (torch.bool, torch.uint8), sum(sizes))
        ends = torch.tensor([0, *accumulate(sizes)], device="cpu")
        flat = segment_packbits(custom.flatten().to(device, torch.bool), ends, "little")[0]
    flat = flat if len(flat) else flat.new_zeros(1)  # kernels take no tensor without elements
    starts = [0, *accumulate(widths)][:-1]
    return {"custom_mask": flat, "mask_start": torch.tensor(starts, dtype=torch.int64, device=device)}


def _check(name: str, x: Any, dtypes: tuple[torch.dtype, ...], size: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"plan: {name}: expected a tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"plan: {name}: expected dtype {dtypes[0]}, got {x.dtype}")
    if x.numel() != size:
        raise ValueError(f"plan: {name}: expected {size} elements, got {list(x.shape)}")
