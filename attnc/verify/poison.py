"""Memory that a module asks for is full of NaN before its kernels see it, so that what nobody wrote shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def poisoned(module: ModuleType) -> Iterator[None]:
    """Within it, torch.empty and what calls of the module allocate by are floats that are NaN."""
    call = getattr(module, "CALL", None)
    own = nullcontext() if call is None else patch.object(call, "allocate", _all_filled(call.allocate))
    with patch.object(torch, "empty", _filled(torch.empty)), own:
        yield


def _filled(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*layout: Any, **options: Any) -> torch.Tensor:
        return _nan(empty(*layout, **options))

    return make


def _all_filled(allocate: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    def make(*layouts: Any) -> list[torch.Tensor]:
        return [_nan(made) for made in allocate(*layouts)]

    return make


def _nan(made: torch.Tensor) -> torch.Tensor:
    return made.fill_(torch.nan) if made.is_floating_point() else made
