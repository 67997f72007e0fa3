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
    """Within it, torch.empty and the module's own way to memory give floats that are NaN."""
    with patch.object(torch, "empty", _filled(torch.empty)):
        own = getattr(module, "_empty", None)
        with nullcontext() if own is None else patch.object(module, "_empty", _filled(own)):
            yield


def _filled(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*layout: Any, **options: Any) -> torch.Tensor:
        made = empty(*layout, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    return make
