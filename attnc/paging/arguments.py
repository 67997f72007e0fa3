"""What callers pass: numbers as Python's own, tensors that fit. Errors name the argument, what was
expected and what came.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import torch

from attnc.diagnostics.shown import show_value
from attnc.support.arguments import check_dense


def to_integer(name: str, given: Any) -> int:
    """Returns an integer of Python, NumPy or torch as an int of Python.

    TypeError for anything else, such as bools, and floats with integer values.
    """
    is_bool = isinstance(given, bool) or getattr(given, "dtype", None) is torch.bool
    try:
        if not is_bool:
            return index(given)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected an integer, got {show_value(given)}")


def to_integers(name: str, given: Any) -> list[int]:
    """Returns several integers, as `to_integer` does. TypeError for anything but a list of them."""
    if not isinstance(given, Iterable) or (isinstance(given, torch.Tensor) and not given.dim()):
        raise TypeError(f"{name}: expected integers, got {show_value(given)}")
    return [number if type(number) is int else to_integer(name, number) for number in given]


def check_size(name: str, given: Any, least: int = 1, most: int = 1 << 30) -> int:
    """Returns a size. TypeError for anything but an integer, ValueError outside of least .. most."""
    size = to_integer(name, given)
    if size < least:
        raise ValueError(f"{name}: expected at least {least}, got {size}")
    if size > most:
        raise ValueError(f"{name}: expected at most {most}, got {size}")
    return size


def check_tensor(
    name: str, given: Any, dtype: torch.dtype, shape: Sequence[int | str], device: torch.device
) -> None:
    """Checks the dtype, the shape (a name stands for any size) and the device of a tensor.

    TypeError for another type or dtype, ValueError for another shape or device.
    """
    check_dense(name, given)
    if given.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {given.dtype}")
    fits = given.dim() == len(shape)
    if not fits or any(isinstance(n, int) and n != m for n, m in zip(shape, given.shape, strict=True)):
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(given.shape)}")
    if given.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {given.device}")
