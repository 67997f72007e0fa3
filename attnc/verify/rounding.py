"""bfloat16 and tf32, which NumPy lacks, bit for bit."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def bf16_to_f32(bits: Array) -> Array:
    """The float32 values of bfloat16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """Bit patterns of float32 values rounded to nearest even; every NaN becomes 0x7fc0, as in torch."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16).reshape(values.shape)


def f32_to_tf32(values: Array) -> Array:
    """float32 values with the 13 low bits of the significand cleared, which is what the tensor core reads."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    cleared = (bits & np.uint32(0xFFFFE000)).view(np.float32).reshape(values.shape)
    return np.where(np.isnan(values), values, cleared)
