"""Few calls in which every value of an argument meets every value of every other; and random calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeAlias

from hypothesis import strategies as st

#: By argument, the values that it may have.
Axes: TypeAlias = Mapping[str, Sequence[Any]]
Values: TypeAlias = dict[str, Any]
#: Whether a function takes these values together.
Fits: TypeAlias = Callable[[Values], bool]


class Pairs:
    """Every pair of values of two arguments, as a bit of a number."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        values = [(name, at) for name, each in axes.items() for at in range(len(each))]
        #: By argument and number of its value: the pairs that it is in.
        self.having: dict[str, list[int]] = {name: [0] * len(each) for name, each in axes.items()}
        for bit, ((a, i), (b, j)) in enumerate(combinations(values, 2)):
            if a != b:
                self.having[a][i] |= 1 << bit
                self.having[b][j] |= 1 << bit

    def of(self, chosen: Values) -> int:
        """Returns the pairs both of whose values are chosen."""
        one = both = 0
        for name, value in chosen.items():
            having = self.having[name][self.axes[name].index(value)]
            both |= one & having
            one |= having
        return both


def drawn(axes: Axes, fits: Fits, source: random.Random) -> Iterator[Values]:
    """Yields values that go together, evenly drawn, without end."""
    while True:
        chosen = {name: source.choice(values) for name, values in axes.items()}
        if fits(chosen):
            yield chosen


def covering(axes: Axes, fits: Fits, *, tries: int = 200) -> list[Values]:
    """Returns few choices with all pairs that many drawn ones have: each adds the most of so many tries."""
    source, pairs = random.Random(0), Pairs(axes)
    candidates = drawn(axes, fits, source)
    wanted = 0
    for _ in range(20 * tries):
        wanted |= pairs.of(next(candidates))
    found: list[Values] = []
    while wanted:
        best = max((next(candidates) for _ in range(tries)), key=lambda x: (wanted & pairs.of(x)).bit_count())
        if new := wanted & pairs.of(best):
            found.append(best)
            wanted ^= new
    return found


def any_of(axes: Axes, fits: Fits) -> st.SearchStrategy[Values]:
    """Draws values that go together."""
    return st.fixed_dictionaries({name: st.sampled_from(list(x)) for name, x in axes.items()}).filter(fits)
