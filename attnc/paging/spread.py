"""Where keys lie that several ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from attnc.paging.arguments import check_size

_Position = TypeVar("_Position", int, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Spread:
    """Says where keys lie that ranks share: blocks of `block` keys go round `ranks`. Position p of a sequence
    is row (p // (ranks * block)) * block + p % block of rank p // block % ranks, so that sequences that grow
    do so everywhere. The first rank never has fewer than another. TypeError and ValueError for what is no
    size of at least 1.
    """

    ranks: int
    block: int

    def __post_init__(self) -> None:
        for name in ("ranks", "block"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))

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

    def longest(self, rows: int, rank: int) -> int:
        """Returns the length of the longest sequence of which a rank has no more than these rows."""
        return (rows // self.block * self.ranks + rank) * self.block + rows % self.block

    def positions(self, rows: int, rank: int, device: torch.device) -> torch.Tensor:
        """Returns the positions of a rank's first rows, ascending, i32."""
        row = torch.arange(rows, dtype=torch.int32, device=device)
        return row // self.block * (self.block * self.ranks) + rank * self.block + row % self.block
