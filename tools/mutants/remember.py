"""References that are computed once for all mutants of a module: they depend on inputs alone.

`attnc verify` computes what is expected of each case, in float64, which takes longer than the kernel. Here
the results are kept in a folder, by what went in, for all processes that judge mutants of the same module.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from attnc.verify import check, gradient_properties, properties

Kept = TypeVar("Kept")
#: Where the functions are looked up by those that call them.
_USED_IN = {
    "expect": (check, properties, gradient_properties),
    "expect_gradients": (check, gradient_properties),
}


def remember_references(folder: Path) -> None:
    """Makes this process keep what is expected of cases in a folder, and find it there."""
    for name, modules in _USED_IN.items():
        kept = remember(getattr(modules[0], name), folder)
        for module in modules:
            setattr(module, name, kept)


def remember(function: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Returns the function with a memory. Its arguments are an attention, of which there is one for the
    folder, tensors by name, and what has a repr that says all of it.
    """

    def remembered(attention: object, *given: Any) -> Any:
        state = hashlib.sha256(function.__name__.encode())
        for value in given:
            _add(state, value)
        return keep(folder / state.hexdigest(), lambda: function(attention, *given))

    return remembered


def keep(path: Path, make: Callable[[], Kept]) -> Kept:
    """Returns what is kept in a file of our own; what is made now, where there is none."""
    if path.is_file():
        found: Kept = pickle.loads(path.read_bytes())  # what was written below
        return found
    made = make()
    with suppress(OSError):  # a full disk
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_bytes(pickle.dumps(made, protocol=5))
        temporary.replace(path)
    return made


def _add(state: Any, value: object) -> None:
    match value:
        case Mapping():
            for name, part in value.items():
                state.update(f"{name}:".encode())
                _add(state, part)
        case torch.Tensor():
            state.update(f"{value.dtype} {tuple(value.shape)}".encode())
            dense = value.detach().flatten().clone(memory_format=torch.contiguous_format)
            state.update(dense.view(torch.uint8).cpu().numpy().tobytes())
        case np.ndarray():
            state.update(f"{value.dtype} {value.shape}".encode())
            state.update(np.ascontiguousarray(value).tobytes())
        case _:
            state.update(repr(value).encode())
