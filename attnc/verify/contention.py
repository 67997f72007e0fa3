"""Memory of a GPU that is busy while a kernel runs, so that what a kernel does not wait for comes late.

A copy into shared memory whose wait is missing is often there all the same, for nothing else keeps memory
busy. Beside copies of whole buffers on a stream of their own it takes several times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

#: Copies, and bytes of each: some milliseconds, more than passes until a kernel that is ready starts.
_COPIES, _BYTES = 32, 1 << 26


@contextmanager
def crowding_memory(device: str, *, is_crowded: bool = True) -> Iterator[None]:
    """Keeps the memory of a GPU busy for some milliseconds. On a CPU it does nothing."""
    if is_crowded and device != "cpu":
        to, content, stream = crowd_of(torch.cuda.current_device())
        with torch.cuda.stream(stream):
            for _ in range(_COPIES):
                to.copy_(content)
    yield


@cache
def crowd_of(device: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Returns the buffers that are copied on a device, where to and from, and the stream."""
    to, content = torch.zeros(2, _BYTES, dtype=torch.uint8, device=f"cuda:{device}").unbind()
    return to, content, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch is not typed
