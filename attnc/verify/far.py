"""Cases in which offsets pass 32 bits: few elements, gigabytes apart.

A kernel that counts an offset in 32 bits is right until a tensor is large. Every tensor that has the axis is
stretched along it here: the last index starts at element 2^31 or beyond, while strides still have 32 bits.
Rows end behind a tile, so that the start of a tile has such an offset too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnc.model.attention import Attention
from attnc.model.tensors import Tensor
from attnc.verify.case import Case, TensorLayout
from attnc.verify.storage import draw_lengths, lengths_for, memory_dims
from attnc.verify.strategies import all_dims, far_along, free_dims

#: Axes that tensors are stretched along.
AXES = ("batch", "heads", "queries", "keys")


def far_case(attention: Attention, tensors: Sequence[Tensor], axes: str, config: Any) -> Case | None:
    """Returns the case of one of `AXES`, with rows for the tiles of a config; None where no tensor has it."""
    lengths = "full" if "full" in lengths_for(attention) else "drawn"
    case = Case(dims=_sizes(attention, axes, config), seed=3, lengths=lengths)
    dims = all_dims(attention, case.dims)
    memory = memory_dims(attention, dims, draw_lengths(attention, dims, case.seed, lengths))
    found = ((tensor.name, list(_stretch(attention, tensor, memory))) for tensor in tensors)
    # of two axes of rows, as a bias has them, the second is that of keys
    layouts = {name: layouts[-1] for name, layouts in found if layouts}
    return replace(case, layouts=layouts) if layouts else None


def _sizes(attention: Attention, axes: str, config: Any) -> dict[str, int]:
    several: Mapping[str, Mapping[str, int]] = {
        "batch": {"B": 3},
        "heads": {"H": 3, "Hkv": 3},
        "queries": {"M": config.BLOCK_M + 1},
        "keys": {"N": config.BLOCK_N + 1},
    }
    return {name: several[axes].get(name, 2 if name == "N" else 1) for name in free_dims(attention)}


def _stretch(attention: Attention, tensor: Tensor, dims: Mapping[str, int]) -> Iterator[TensorLayout]:
    for axis in range(len(tensor.shape)):
        if (layout := far_along(attention, tensor, axis, dims)) is not None:
            yield layout
