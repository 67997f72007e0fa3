"""Memory that is the same call by call, so that launches of several calls can be compared."""

from __future__ import annotations

from typing import Any

import torch


class Memory:
    """What a module allocates: the same memory for the same allocations, call by call."""

    def __init__(self) -> None:
        self._made: dict[object, torch.Tensor] = {}
        self._count = 0

    def start(self) -> None:
        self._count = 0

    def allocate(self, layouts: Any, like: torch.Tensor) -> list[torch.Tensor]:
        return [self._empty(layout) for layout in layouts]

    def _empty(self, layout: Any) -> torch.Tensor:
        self._count += 1
        key = (self._count, layout)
        if key not in self._made:
            shape, strides, dtype = layout
            self._made[key] = torch.empty_strided(shape, strides, dtype=dtype)
        return self._made[key]
