"""Whose kernels a call runs on, where its caller does not say."""

from __future__ import annotations

import torch

from attnc.api.hopper import HOPPER, suits_hopper
from attnc.flex.tape import Tape, operands

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


def reads_pairs(tape: Tape) -> bool:
    """Whether an element of a tensor is read for each pair of a query and a key, as of a bias by distance:
    Triton's kernels read rows of them, those of wgmma one by one where a thread has its scores.
    """
    depends: list[frozenset[str]] = []
    for entry in tape.entries:
        own = frozenset(entry[1:]) if entry[0] == "index" else frozenset()
        depends.append(own.union(*(depends[at] for at in operands(entry))))
        if entry[0] == "load" and depends[-1] >= {"q_idx", "kv_idx"}:
            return True
    return False
