"""Measured times -> which implementation from which M on (FlashDecoding++, arXiv 2311.01282, section 5.2).

The paper's table has two numbers for each [N, K] and device: M1, from which the flat product is faster than
GEMV, and M2, from which the conventional one is. That presumes that the order never turns back; where a
measurement says it does, the thresholds that lose least are taken and what they lose is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import inf, log

from attnc.model.projection import IMPLS, Impl

#: Times that differ by less are taken for equal.
_NOISE = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossovers:
    """chosen: the implementation for each measured M, ascending in the order of IMPLS; exceptions: (M, what
    was faster there, by which factor).
    """

    chosen: Mapping[int, Impl]
    exceptions: tuple[tuple[int, Impl, float], ...]

    def first(self, impl: Impl) -> int | None:
        """The smallest measured M from which an implementation, or a later one, is used; None if never."""
        later = IMPLS[IMPLS.index(impl) :]
        return next((M for M, found in self.chosen.items() if found in later), None)

    def notes(self) -> tuple[str, ...]:
        """What a table of dispatch says of them."""
        m1, m2 = self.first("flat"), self.first("conventional")
        thresholds = f"M1 = {m1 or 'none'}, M2 = {m2 or 'none'}"
        if not self.exceptions:
            return (thresholds, "monotone at every M that was measured, to 1 %")
        lost = ", ".join(f"{impl} at M = {M} by {factor:.2f}x" for M, impl, factor in self.exceptions)
        return (thresholds, f"not monotone: faster would be {lost}")


def crossovers(times: Mapping[int, Mapping[Impl, float]]) -> Crossovers:
    """The thresholds with the smallest product of slowdowns. times: M -> implementation -> microseconds.

    An implementation that was not measured at some M cannot be chosen there.
    """
    rows = sorted(times)
    impls = tuple(impl for impl in IMPLS if any(impl in times[M] for M in rows))
    best = {M: min(times[M].values()) for M in rows}

    def cost(assigned: Iterable[Impl]) -> float:
        return sum(log(times[M].get(impl, inf) / best[M]) for M, impl in zip(rows, assigned, strict=True))

    candidates = [_assigned(cuts, impls, len(rows)) for cuts in _cuts(len(rows), len(impls))]
    chosen: dict[int, Impl] = dict(zip(rows, min(candidates, key=cost), strict=True))
    exceptions = []
    for M in rows:
        winner = min(times[M], key=lambda impl: times[M][impl])
        if (factor := times[M][chosen[M]] / times[M][winner]) > _NOISE:
            exceptions.append((M, winner, factor))
    return Crossovers(chosen=chosen, exceptions=tuple(exceptions))


def _cuts(count: int, impls: int) -> list[tuple[int, ...]]:
    return list(combinations_with_replacement(range(count + 1), impls - 1))


def _assigned(cuts: Sequence[int], impls: Sequence[Impl], count: int) -> tuple[Impl, ...]:
    """Row i has the implementation after as many cuts as stand at or before it."""
    return tuple(impls[sum(cut <= i for cut in cuts)] for i in range(count))
