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


def pairs_of(axes: Axes, chosen: Values) -> set[tuple[str, int, str, int]]:
    """Names every pair of arguments, each with the number of its value."""
    at = {name: axes[name].index(value) for name, value in chosen.items()}
    return {(a, at[a], b, at[b]) for a, b in combinations(axes, 2)}


def drawn(axes: Axes, fits: Fits, source: random.Random) -> Iterator[Values]:
    """Yields values that go together, evenly drawn, without end."""
    while True:
        chosen = {name: source.choice(values) for name, values in axes.items()}
        if fits(chosen):
            yield chosen


def covering(axes: Axes, fits: Fits, *, tries: int = 200) -> list[Values]:
    """Returns few choices with all pairs that many drawn ones have: each adds the most of so many tries."""
    source = random.Random(0)
    candidates = drawn(axes, fits, source)
    wanted = set[tuple[str, int, str, int]]()
    for _ in range(20 * tries):
        wanted |= pairs_of(axes, next(candidates))
    found: list[Values] = []
    while wanted:
        best = max((next(candidates) for _ in range(tries)), key=lambda x: len(wanted & pairs_of(axes, x)))
        if new := wanted & pairs_of(axes, best):
            found.append(best)
            wanted -= new
    return found


def any_of(axes: Axes, fits: Fits) -> st.SearchStrategy[Values]:
    """Draws values that go together."""
    return st.fixed_dictionaries({name: st.sampled_from(list(x)) for name, x in axes.items()}).filter(fits)
