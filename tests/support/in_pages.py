"""Where launches of gradients find tensors, for tests of pages alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from attnc.support.memory import memory_of


def place_of(given: Sequence[str], made: Mapping[str, torch.Tensor], **sizes: int) -> Any:
    """Returns a `Place` of what is given and what is made, of which there are page numbers."""
    numbers = made["_pages"]
    return SimpleNamespace(
        names={"B": len(numbers), **sizes},
        order=(*given, *made),
        results=tuple(made),
        memories={name: memory_of(x) for name, x in made.items()},
        device=numbers.device,
    )
