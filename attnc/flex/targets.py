"""Whose kernels a call runs on, where its caller does not say."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

HOPPER, TRITON = "cuda.sm_90a", "triton"


def targets_of(
    target: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    wanted: tuple[tuple[str, int], ...],
) -> tuple[str, str]:
    """(the target, what takes its place where it has no kernel for the mods, or "" where nothing may).

    target: the caller's choice, None or "" for none. Then it is that of wgmma and TMA where the GPU, the
    types, the sizes of rows and the strides are made for it, so that nothing is copied; Triton's elsewhere,
    and where tiles are wanted, as torch's options name those of Triton's kernels.
    """
    if target:
        return target, ""
    widths = (query.shape[3], value.shape[3])
    if (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and not wanted
        and all(width % 16 == 0 and width <= 256 for width in widths)
        and _is_hopper(query.device.index)
        and all(map(_is_taken, (query, key, value)))
    ):
        return HOPPER, TRITON
    return TRITON, ""


def _is_taken(x: torch.Tensor) -> bool:
    """Whether TMA takes the strides of a tensor of 16 bits."""
    outer = zip(x.shape[:-1], x.stride(), strict=False)
    return all(size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in outer)


@cache
def _is_hopper(device: int) -> bool:
    """Whether it runs the kernels of this target, and CuPy is there to launch them."""
    return torch.cuda.get_device_capability(device) == (9, 0) and importlib.util.find_spec("cupy") is not None
