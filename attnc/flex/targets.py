"""Whose kernels a call runs on, where its caller does not say."""

from __future__ import annotations

import torch

from attnc.api.hopper import HOPPER, suits_hopper

TRITON = "triton"


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
    if not wanted and suits_hopper(query, key, value):
        return HOPPER, TRITON
    return TRITON, ""
