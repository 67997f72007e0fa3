"""flash-attention 4's lists of blocks, as one list for each block of queries."""

from __future__ import annotations

from typing import Any

import torch

from attnc.diagnostics.shown import show_value

#: Queries and keys of a block where nothing is said: tiles of flash-attention's kernel for Hopper.
_USUAL = (128, 128)
#: What sizes of blocks have as a factor: tiles of kernels divide them.
_LEAST = 16


def list_of_blocks(
    function: str, given: Any, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Returns (i32[B or 1, H or 1, R, S], (queries, keys of a block)): for every block of queries the blocks
    of keys that either list names, and -1 in other places.

    given: an object with `mask_block_cnt`, `mask_block_idx`, and, or None, `full_block_cnt`, `full_block_idx`
    and `block_size`. ValueError names what is wrong.
    """
    name = f"{function}: block_sparse_tensors"
    rows, keys = _size_of(name, getattr(given, "block_size", None))
    parts = []
    for kind in ("mask", "full"):
        counts, indices = (getattr(given, f"{kind}_block_{what}", None) for what in ("cnt", "idx"))
        if (counts is None) != (indices is None):
            raise ValueError(f"{name}: {kind}_block_cnt and {kind}_block_idx: expected both or none")
        if counts is not None and indices is not None:
            _check(f"{name}: {kind}_block", counts, indices, q, -(-q.shape[1] // rows))
            places = torch.arange(indices.shape[-1], device=indices.device)
            parts.append(torch.where(places < counts[..., None], indices, -1).int())
    if not parts:
        raise ValueError(f"{name}: expected mask_block_cnt and mask_block_idx, got {type(given).__name__}")
    outer = [max(part.shape[axis] for part in parts) for axis in (0, 1)]
    return torch.cat([part.expand(*outer, *part.shape[2:]) for part in parts], dim=-1), (rows, keys)


def _size_of(name: str, given: Any) -> tuple[int, int]:
    sizes = _USUAL if given is None else given
    is_pair = isinstance(sizes, tuple | list) and len(sizes) == 2
    if not is_pair or any(type(size) is not int or size < _LEAST or size % _LEAST for size in sizes):
        came = show_value(given)
        raise ValueError(f"{name}: block_size: expected two multiples of {_LEAST}, got {came}")
    return sizes[0], sizes[1]


def _check(name: str, counts: Any, indices: Any, q: torch.Tensor, blocks: int) -> None:
    for what, x, axes in (("cnt", counts, 3), ("idx", indices, 4)):
        if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int32, torch.int64) or x.dim() != axes:
            raise ValueError(f"{name}_{what}: expected a tensor of integers with {axes} axes")
        wanted = (q.shape[0], q.shape[2])
        fits = all(size in (1, whole) for size, whole in zip(x.shape, wanted, strict=False))
        if not fits or x.shape[2] != blocks or x.shape[:3] != counts.shape:
            shape = f"[{wanted[0]} or 1, {wanted[1]} or 1, {blocks}{', any' * (axes - 3)}]"
            raise ValueError(f"{name}_{what}: expected shape {shape}, got {list(x.shape)}")
