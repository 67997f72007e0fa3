"""Sections: which heads are worked at beside each other, so that what their programs read stays in the L2
cache.

Programs of one head read the same K and V, or in a backward the same q and do. A grid walks over the tiles of
a section of heads, and then over those of the next one. How many heads that are is decided here, as a part of
the cache of a device that is known when a kernel is called; modules declare it, and `support.sizes` computes
it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """How many heads a section has: as many as fill a part of the L2 cache.

    cache: that part, a quotient; least, most: the fewest and the most, unless there are fewer heads.
    rounds: so many tiles for each multiprocessor are in a section at least, and sections are as large as each
    other: blocks take tiles from a counter, the longest first, and those of a small last section would come
    last. 0: it does not matter.
    """

    cache: tuple[int, int]
    least: int = 1
    most: int | None = None
    rounds: int = 0


#: Others need the cache too, and programs are not all at the same tile.
A_QUARTER = Section(cache=(1, 4), least=4, most=16)
#: The same where loops are short, so that a program reads few rows of a head: more heads than would fit.
SHORT_LOOPS = Section(cache=(1, 4), least=16, most=16)
HALF = Section(cache=(1, 2))
EVEN = Section(cache=(5, 9), rounds=1)
