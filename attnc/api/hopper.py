"""Calls that Hopper's own kernels, those of `cuda.sm_90a`, take as they are."""

from __future__ import annotations

from functools import cache

import torch

from attnc.support.by_target import Needs, runs

HOPPER = "cuda.sm_90a"
#: `attnc.target.dispatch.needs_of` this target, without the compiler, which a kept kernel does not need.
NEEDS = Needs("cupy", 90, 90, interprets=False)


def suits_hopper(*tensors: torch.Tensor) -> bool:
    """Returns whether the GPU of q, k and v is a Hopper, and their type, the sizes of their rows and their
    strides are those of wgmma and TMA, so that nothing is copied.
    """
    first = tensors[0]
    return (
        first.is_cuda
        and first.dtype in (torch.float16, torch.bfloat16)
        and _is_hopper(first.device.index)
        and all(map(_is_taken, tensors))
    )


def _is_taken(x: torch.Tensor) -> bool:
    """Returns whether TMA takes a tensor of 16 bits."""
    outer = zip(x.shape[:-1], x.stride(), strict=False)
    return (
        x.shape[-1] % 8 == 0
        and x.shape[-1] <= 256
        and all(size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in outer)
    )


@cache
def _is_hopper(device: int) -> bool:
    """Returns whether a device runs the kernels of this target, and what launches them is there."""
    return runs(NEEDS, device)
