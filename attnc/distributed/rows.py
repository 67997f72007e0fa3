"""Which rows go where, as index tensors on the device: a plan's numbers made once and used by every call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attnc.distributed.plan import Plan
from attnc.distributed.spans import Ints


@dataclass(frozen=True, slots=True)
class Places:
    """Rows of a tensor: a slice where they follow each other, else an index. What is done with no rows calls
    nothing: most pairs of ranks have none for each other.
    """

    first: int
    count: int
    index: torch.Tensor | None

    def of(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Takes these rows of x: a view where they are a slice."""
        if self.index is None:
            return x.narrow(axis, self.first, self.count)
        return x.index_select(axis, self.index)

    def copy(self, x: torch.Tensor, axis: int, into: torch.Tensor) -> None:
        """Writes these rows of x into other memory."""
        if not self.count:
            return
        if self.index is None:
            into.copy_(x.narrow(axis, self.first, self.count))
        else:
            torch.index_select(x, axis, self.index, out=into)

    def put(self, x: torch.Tensor, axis: int, rows: torch.Tensor) -> None:
        """Writes these rows."""
        if not self.count:
            return
        if self.index is None:
            x.narrow(axis, self.first, self.count).copy_(rows)
        else:
            x.index_copy_(axis, self.index, rows)

    def clear(self, x: torch.Tensor, axis: int) -> None:
        """Makes these rows zero."""
        if not self.count:
            return
        if self.index is None:
            x.narrow(axis, self.first, self.count).zero_()
        else:
            x.index_fill_(axis, self.index, 0)

    def add(self, x: torch.Tensor, axis: int, rows: torch.Tensor) -> None:
        """Adds to these rows; none is there twice, so that sums do not depend on an order."""
        if not self.count:
            return
        if self.index is None:
            x.narrow(axis, self.first, self.count).add_(rows)
        else:
            x.index_add_(axis, self.index, rows)


def places(rows: Ints, device: torch.device) -> Places:
    """The rows of these numbers."""
    count = len(rows)
    first = int(rows[0]) if count else 0
    if not count or int(rows[-1]) - first == count - 1:
        return Places(first, count, None)
    return Places(first, count, torch.as_tensor(np.ascontiguousarray(rows), device=device))


@dataclass(frozen=True, slots=True)
class Route:
    """Rows that move: sent[r] of what this rank owns go to rank r, kept[r] is where its own arrive."""

    sent: tuple[Places, ...]
    kept: tuple[Places, ...]


def key_route(plan: Plan, rank: int, device: torch.device) -> Route:
    """Routes k and v from their owners to the windows of those who wait for them."""
    mine = plan.owned_keys(rank)
    ranks = range(plan.ranks)
    sent = [np.flatnonzero(np.isin(mine, plan.keys(r), assume_unique=True)) for r in ranks]
    keys = plan.keys(rank)
    first, _ = plan.window(rank)
    kept = [
        np.intersect1d(plan.owned_keys(other), keys, assume_unique=True) - first
        for other in range(plan.ranks)
    ]
    return Route(tuple(places(x, device) for x in sent), tuple(places(x, device) for x in kept))


def key_sources(plan: Plan, rank: int) -> tuple[Ints, Ints]:
    """Says of each key of a rank's window who has it, and which of the keys it is that this rank sends; -1
    for holes, which nobody sends.
    """
    first, stop = plan.window(rank)
    source, number = np.full(stop - first, -1, np.int64), np.full(stop - first, -1, np.int64)
    keys = plan.keys(rank)
    for other in range(plan.ranks):
        rows = np.intersect1d(plan.owned_keys(other), keys, assume_unique=True) - first
        source[rows], number[rows] = other, np.arange(len(rows))
    return source, number


def query_route(plan: Plan, rank: int, device: torch.device) -> Route:
    """Routes rows of q from their owners to the ranks whose rectangles have them."""
    everything = np.arange(len(plan.owned_rows(rank)))
    nothing = np.zeros(0, np.int64)
    mates = plan.mates(rank)
    rows = plan.rows(rank)
    sent = [everything if other in mates else nothing for other in range(plan.ranks)]
    kept = [
        np.searchsorted(rows, plan.owned_rows(other)) if other in mates else nothing
        for other in range(plan.ranks)
    ]
    return Route(tuple(places(x, device) for x in sent), tuple(places(x, device) for x in kept))
