"""Chunks exchanged between ranks until the slowest rank has least to do and to wait for.

What a rank takes is its work, and the keys of chunks that are not its own and that its rows see: they have to
come, and to be put in order. It depends on the rank's own chunks alone, so that an exchange of two chunks
changes two ranks, and all exchanges between two ranks are looked at as one array.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from attnc.distributed.spans import Bools, Ints

Bits: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float64]

#: How often the exchanges of two ranks are looked at, by which the time of the host is bounded: in all; for
#: each pair of ranks, where they are few; and where they are many.
_LOOKS, _MOST_OF_PAIR, _LEAST_OF_PAIR = 160, 24, 3
#: What a score above the mean counts in excess of others.
_UNEVEN = 10.0


@dataclass(frozen=True, slots=True)
class _Rank:
    """chunks: that it owns; seen: by the others, of each; own: which those are; load: their work, in that of
    the mean rank; cost: of all that it does and waits for.
    """

    chunks: Ints
    seen: Bits
    own: Bits
    load: float
    cost: float


class Exchange:
    """Owners of chunks, improved: the sum over ranks of the fourth powers of their times falls, in which the
    longest counts most.

    work: of each chunk; seen: whose keys it sees, [chunks, chunks]; waiting: the work that is done in the
    time in which the keys of a chunk come; even: the share of the mean beyond which work is uneven.
    """

    def __init__(
        self, work: Floats, seen: Bools, owner: Ints, ranks: int, *, waiting: float, even: float
    ) -> None:
        mean = max(float(work.sum()) / ranks, 1.0)
        self.owner, self._ranks, self._even = owner.copy(), ranks, even
        self._work, self._waiting = work / mean, waiting / mean
        self._seen, self._own = _pack_bits(seen), _pack_bits(np.eye(len(work), dtype=np.bool_))
        self._state = [self._rank(rank) for rank in range(ranks)]
        self._done = set[tuple[int, int]]()  # pairs of ranks that have nothing to exchange
        pairs = ranks * (ranks - 1) // 2
        self._looks = max(min(_LOOKS, _MOST_OF_PAIR * pairs), _LEAST_OF_PAIR * pairs)

    def improve(self) -> Ints:
        """Returns the owners after exchanges that each shorten the whole; and where there is time left, after
        some that do not, if the ones behind them make up for it.
        """
        random = np.random.default_rng(0)
        self._descend()
        best = self.owner.copy(), self._total()
        while self._looks > 0 and len(np.unique(self.owner)) > 1:
            before = self.owner.copy(), list(self._state), set(self._done)
            for _ in range(2):
                a = int(random.integers(len(self.owner)))
                others = np.flatnonzero(self.owner != self.owner[a])
                self._swap(a, int(others[random.integers(len(others))]))
            self._descend()
            if self._total() < best[1] - 1e-6:
                best = self.owner.copy(), self._total()
            else:
                self.owner, self._state, self._done = before
        return best[0]

    def _total(self) -> float:
        return sum(rank.cost for rank in self._state)

    def _descend(self) -> None:
        while pairs := list(self._pairs()):
            for x, y in pairs:
                if (x, y) in self._done or self._looks <= 0:
                    continue
                self._looks -= 1
                found = self._best_of(self._state[x], self._state[y])
                if found is None:
                    self._done.add((x, y))
                else:
                    self._swap(*found)
            if self._looks <= 0:
                break

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Returns the pairs of ranks that may have something to exchange, those furthest apart first."""
        state = self._state
        pairs = [pair for pair in combinations(range(self._ranks), 2) if pair not in self._done]
        return iter(sorted(pairs, key=lambda pair: -abs(state[pair[0]].cost - state[pair[1]].cost)))

    def _best_of(self, x: _Rank, y: _Rank) -> tuple[int, int] | None:
        if not len(x.chunks) or not len(y.chunks):
            return None
        less = self._work[x.chunks][:, None] - self._work[y.chunks]
        both = self._own[x.chunks][:, None] | self._own[y.chunks]
        of_x = (x.seen[:, None] | self._seen[y.chunks]) & ~(x.own ^ both)
        of_y = (y.seen | self._seen[x.chunks][:, None]) & ~(y.own ^ both)
        cost = self._cost(x.load - less, of_x) + self._cost(y.load + less, of_y)
        at = int(cost.argmin())
        if cost.flat[at] > x.cost + y.cost - 1e-4:
            return None
        return int(x.chunks[at // len(y.chunks)]), int(y.chunks[at % len(y.chunks)])

    def _swap(self, a: int, b: int) -> None:
        ranks = int(self.owner[a]), int(self.owner[b])
        self.owner[a], self.owner[b] = ranks[1], ranks[0]
        for rank in ranks:
            self._state[rank] = self._rank(rank)
        self._done = {pair for pair in self._done if not set(pair) & set(ranks)}

    def _rank(self, rank: int) -> _Rank:
        chunks = np.flatnonzero(self.owner == rank)
        seen, load = self._seen[chunks], self._work[chunks].sum()
        before, behind = np.zeros((2, len(chunks) + 1, seen.shape[1]), np.uint64)
        np.bitwise_or.accumulate(seen, axis=0, out=before[1:])
        behind[:-1] = np.bitwise_or.accumulate(seen[::-1], axis=0)[::-1]
        own = np.bitwise_or.reduce(self._own[chunks], axis=0)
        cost = float(self._cost(load, before[-1] & ~own))
        return _Rank(chunks, before[:-1] | behind[1:], own, float(load), cost)

    def _cost(self, load: Floats, coming: Bits) -> Floats:
        count = np.bitwise_count(coming)
        keys = count[..., 0] if count.shape[-1] == 1 else count.sum(axis=-1)
        total = load + _UNEVEN * np.maximum(load - (1.0 + self._even), 0.0) + self._waiting * keys
        squared = total * total
        return np.asarray(squared * squared)


def _pack_bits(x: Bools) -> Bits:
    padded = np.zeros((len(x), max(-(-x.shape[1] // 64), 1) * 64), np.bool_)
    padded[:, : x.shape[1]] = x
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint64)
