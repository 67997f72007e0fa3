"""What the functions of `attnc.compat` make of their arguments before a kernel sees them."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from attnc.support.memory import made_apart

#: No row is further from another; q_pos - left stays inside of 32 bits.
_FAR = 1 << 30
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refuse(function: str, **asked: object) -> None:
    """ValueError for the first argument that asks for what there is not: anything but None, False and 0."""
    for name, value in asked.items():
        if value is not None and (isinstance(value, torch.Tensor) or bool(value)):
            came = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{function}: {name} is not supported: expected None, got {came}")


def one_of(function: str, **named: Any) -> Any:
    """The one value that is not None among names of the same argument. TypeError for two."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise TypeError(f"{function}: {' and '.join(given)} are the same argument: give one of them")
    return next(iter(given.values()), None)


def check(function: str, q: torch.Tensor, **others: torch.Tensor) -> str:
    """The name of the dtype that all tensors have. TypeError and ValueError naming the argument."""
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"{function}: q: expected a tensor, got {type(q).__name__}")
    if q.dtype not in _DTYPES:
        raise TypeError(f"{function}: q: expected float16, bfloat16 or float32, got {q.dtype}")
    for name, x in others.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{function}: {name}: expected a tensor, got {type(x).__name__}")
        if x.dtype != q.dtype:
            raise TypeError(f"{function}: {name}: expected {q.dtype} like q, got {x.dtype}")
    return str(q.dtype).removeprefix("torch.")


def rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor with a contiguous last axis: itself, or, as in flash-attention, a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def window(function: str, causal: bool, window_size: Any) -> tuple[bool, int | None, int | None]:
    """(causal, left, right) of a mask; None: no bound. Causal is a right of 0, whatever the window says."""
    try:
        left, right = (-1 if bound is None else int(bound) for bound in window_size)
    except (TypeError, ValueError):
        raise ValueError(
            f"{function}: window_size: expected (left, right), -1 for no bound, got {window_size!r}"
        ) from None
    causal = bool(causal) or right == 0
    return (
        causal,
        min(left, _FAR) if left >= 0 else None,
        min(right, _FAR) if right >= 0 and not causal else None,
    )


def number(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor | float:
    """A scalar as kernels take it: on the device, the same tensor for the same value.

    What is made while a graph is captured belongs to the graph, and the tracer wants the number.
    """
    if torch.compiler.is_compiling():
        return value
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.full((), value, dtype=dtype, device=device)
    return _kept(value, dtype, device)


@lru_cache(maxsize=1024)
def _kept(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    make = partial(torch.full, (), value, dtype=dtype, device=device)
    if device.type == "cuda":
        return made_apart(make)
    with torch.inference_mode(False):
        return make()
