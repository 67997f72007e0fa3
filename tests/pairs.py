"""Few calls in which every value of an argument meets every value of every other; and random calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import Any, TypeAlias

from hypothesis import strategies as st

#: By argument, the values that it may have.
Axes: TypeAlias = Mapping[str, Sequence[Any]]
Values: TypeAlias = dict[str, Any]
#: The place of the value of each argument in its axis, in the order of the axes.
Places: TypeAlias = Sequence[int]
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

    def of(self, chosen: Places) -> int:
        """Returns the pairs both of whose values are chosen."""
        one = both = 0
        for having, at in zip(self.having.values(), chosen, strict=True):
            both |= one & having[at]
            one |= having[at]
        return both


def drawn(axes: Axes, fits: Fits, source: random.Random) -> Iterator[tuple[Places, Values]]:
    """Yields values that go together, and the place of each in its axis, evenly drawn, without end."""
    bits = source.getrandbits
    each = [(name, values, len(values), len(values).bit_length()) for name, values in axes.items()]
    while True:
        places, chosen = [], {}
        for name, values, count, width in each:
            at = bits(width)
            while at >= count:  # what `choice` does, at a third of its time
                at = bits(width)
            places.append(at)
            chosen[name] = values[at]
        if fits(chosen):
            yield places, chosen


def covering(axes: Axes, fits: Fits, *, tries: int = 200) -> list[Values]:
    """Returns few choices with all pairs that many drawn ones have: each adds the most of so many tries."""
    source, pairs = random.Random(0), Pairs(axes)
    candidates = drawn(axes, fits, source)
    wanted = 0
    for places, _ in islice(candidates, 20 * tries):
        wanted |= pairs.of(places)
    found: list[Values] = []
    while wanted:
        having = [(wanted & pairs.of(places), chosen) for places, chosen in islice(candidates, tries)]
        new, best = max(having, key=lambda x: x[0].bit_count())
        if new:
            found.append(best)
            wanted ^= new
    return found


def any_of(axes: Axes, fits: Fits) -> st.SearchStrategy[Values]:
    """Draws values that go together."""
    return st.fixed_dictionaries({name: st.sampled_from(list(x)) for name, x in axes.items()}).filter(fits)
