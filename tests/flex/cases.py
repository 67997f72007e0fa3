"""The table of mods that torch's own tests and attention-gym are about, in four modules beside this one.

Each case makes the mods for sizes and a device, with the tensors that they read; the text is ours, what they
compute is public. `refused` holds those that no spec can say, with the operation that is why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypeAlias

import torch

Mod: TypeAlias = Callable[..., Any]
Make: TypeAlias = "Callable[[Setting], Mod]"
INF = float("inf")


@dataclass(slots=True)
class Setting:
    """Sizes of a call, and tensors for it; those that were learned get gradients."""

    B: int = 2
    H: int = 4
    S: int = 48
    device: str = "cpu"
    learned: list[torch.Tensor] = field(default_factory=list)
    seed: int = 0

    def floats(self, *shape: int, learned: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        made = torch.randn(shape, generator=generator).to(self.device, dtype).requires_grad_(learned)
        if learned:
            self.learned.append(made)
        return made

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, device=self.device, dtype=dtype)

    def documents(self) -> torch.Tensor:
        return (torch.arange(self.S, device=self.device) * 3 // self.S).int()

    def offsets(self) -> torch.Tensor:
        counts = torch.bincount(self.documents())
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


@dataclass(frozen=True, slots=True)
class Case:
    """make: (score_mod, mask_mod) for a setting; refused: the operation that no spec has."""

    name: str
    make: Callable[[Setting], tuple[Mod | None, Mod | None]]
    refused: str = ""


CASES: list[Case] = []


def score(make: Make) -> Make:
    """Adds a function that makes a score_mod."""
    CASES.append(Case(make.__name__, lambda s: (make(s), None)))
    return make


def mask(make: Make) -> Make:
    """Adds a function that makes a mask_mod."""
    CASES.append(Case(make.__name__, lambda s: (None, make(s))))
    return make


def refused(operation: str) -> Callable[[Make], Make]:
    """Adds a function that makes a score_mod (a mask_mod will do) which no spec can say."""

    def add(make: Make) -> Make:
        CASES.append(Case(make.__name__, lambda s: _by_arity(make(s)), operation))
        return make

    return add


def _by_arity(mod: Mod) -> tuple[Mod | None, Mod | None]:
    return (None, mod) if len(signature(mod).parameters) == 4 else (mod, None)


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv
