"""Tensor maps for kernels that run on the CPU: what `cuTensorMapEncodeTiled` takes, in the open."""

from __future__ import annotations

import struct
from collections.abc import Sequence

#: Bytes that a swizzle permutes as one row; 0: none.
SPANS = (0, 32, 64, 128)


def tensor_map(
    pointer: int,
    element_bytes: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
) -> bytes:
    """The 128 bytes of `simt::Map` in `templates/sm90/simt_state.h`.

    sizes, box: elements, innermost first; strides: bytes, of all dimensions but the innermost; swizzle: bytes
    of its span. Raises ValueError where the driver's function would refuse (CUDA driver API,
    cuTensorMapEncodeTiled).
    """
    rank = len(sizes)
    row = box[0] * element_bytes
    refused = {
        "1 to 5 dimensions": not 1 <= rank <= 5 or len(box) != rank or len(strides) != rank - 1,
        "an address that is a multiple of 16": pointer % 16 != 0 or pointer == 0,
        "sizes from 1 to 2^32": any(not 1 <= size <= 1 << 32 for size in sizes),
        "strides that are multiples of 16 below 2^40": any(s % 16 or not 0 <= s < 1 << 40 for s in strides),
        "boxes from 1 to 256": any(not 1 <= edge <= 256 for edge in box),
        "rows of a box that are multiples of 16 bytes": row % 16 != 0,
        "a swizzle of 0, 32, 64 or 128 bytes": swizzle not in SPANS,
        "rows of a box within the swizzle": swizzle > 0 and row > swizzle,
    }
    if wrong := [rule for rule, broken in refused.items() if broken]:
        raise ValueError(f"a tensor map needs {wrong[0]}")

    def five(values: Sequence[int], count: int = 5) -> list[int]:
        return [*values, *[1] * (count - len(values))]

    packed = struct.pack(
        "=Q2I5Q4Q5II",
        *(pointer, rank, element_bytes),
        *five(sizes),
        *five(strides, 4),
        *five(box),
        swizzle,
    )
    return packed.ljust(128, b"\0")
