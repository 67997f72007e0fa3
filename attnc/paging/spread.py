"""Which rank has which keys of a sequence, where several ranks share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from attnc.paging.arguments import check_size

_Position = TypeVar("_Position", int, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Spread:
    """Says which rank has which keys of a sequence: blocks of `block` keys are dealt to `ranks` in turn.

    The key at position p is row p // (ranks * block) * block + p % block of rank p // block % ranks. So a
    sequence grows on all ranks alike, and no rank has more keys than the first. Raises TypeError or
    ValueError if a size is not an integer of at least 1.
    """

    ranks: int
    block: int

    def __post_init__(self) -> None:
        for name in ("ranks", "block"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))

    def rank(self, position: _Position) -> _Position:
        """Returns the rank that has the key at a position, or at each of a tensor of positions."""
        return position // self.block % self.ranks

    def row(self, position: _Position) -> _Position:
        return position // (self.block * self.ranks) * self.block + position % self.block

    def count(self, length: int, rank: int) -> int:
        """Counts the keys of a sequence of this length that a rank has."""
        round_ = self.block * self.ranks
        return length // round_ * self.block + min(max(length % round_ - rank * self.block, 0), self.block)

    def counts(self, lengths: torch.Tensor, rank: int) -> torch.Tensor:
        """Counts the same for many sequences, on the device: a tensor like lengths."""
        round_ = self.block * self.ranks
        return lengths // round_ * self.block + (lengths % round_ - rank * self.block).clamp(0, self.block)

    def longest(self, rows: int, rank: int) -> int:
        """Returns the length of the longest sequence of which a rank has at most so many rows."""
        return (rows // self.block * self.ranks + rank) * self.block + rows % self.block

    def positions(self, rows: int, rank: int, device: torch.device) -> torch.Tensor:
        """Returns the positions of a rank's first rows, ascending, i32."""
        row = torch.arange(rows, dtype=torch.int32, device=device)
        return row // self.block * (self.block * self.ranks) + rank * self.block + row % self.block
