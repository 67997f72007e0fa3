"""Where the keys of a sequence lie when several ranks share them: blocks of so many go round the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

_Position = TypeVar("_Position", int, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Spread:
    """Says where keys lie that ranks share: blocks of `block` keys go round `ranks`. Position p of a sequence
    is row (p // (ranks * block)) * block + p % block of rank p // block % ranks, so that sequences that grow
    do so everywhere. The first rank never has fewer than another.
    """

    ranks: int
    block: int

    def rank(self, position: _Position) -> _Position:
        """Returns the rank that has the key at each position."""
        return position // self.block % self.ranks

    def row(self, position: _Position) -> _Position:
        """Returns which row of its rank's cache the key at each position is."""
        return position // (self.block * self.ranks) * self.block + position % self.block

    def count(self, length: int, rank: int) -> int:
        """Counts the keys that a rank has of a sequence of this length."""
        round_ = self.block * self.ranks
        return length // round_ * self.block + min(max(length % round_ - rank * self.block, 0), self.block)

    def counts(self, lengths: torch.Tensor, rank: int) -> torch.Tensor:
        """Counts the same of many sequences, as a tensor of the type of lengths, without a wait."""
        round_ = self.block * self.ranks
        return lengths // round_ * self.block + (lengths % round_ - rank * self.block).clamp(0, self.block)

    def positions(self, rows: int, rank: int, device: torch.device) -> torch.Tensor:
        """Returns the positions of a rank's first rows, ascending, i32."""
        row = torch.arange(rows, dtype=torch.int32, device=device)
        return row // self.block * (self.block * self.ranks) + rank * self.block + row % self.block
