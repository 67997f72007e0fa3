"""Bugs planted in stick-breaking."""

from __future__ import annotations

from tests.planted.bug import TritonBug

BUGS: tuple[TritonBug, ...] = (
    TritonBug(
        name="the first key first",
        attention="stick_breaking",
        story="the sum ran over the keys before, and recent keys got what old ones had left",
        anchor="after = tl.cumsum(left, 1, reverse=True)",
        patch="after = tl.cumsum(left, 1)",
    ),
    TritonBug(
        name="a key that leaves its own share to itself",
        attention="stick_breaking",
        story="log sigmoid(z) is z less what the key leaves, which was taken for what others leave",
        anchor="p = tl.exp2(z - after)",
        patch="p = tl.exp2(z - after + left)",
    ),
    TritonBug(
        name="earlier tiles of the whole stick",
        attention="stick_breaking",
        story="a tile of later keys took its share, and what earlier ones had was not made less",
        anchor="acc * tl.exp2(-broken)[:, None]",
        patch="acc",
    ),
    TritonBug(
        name="excluded keys break off halves",
        attention="stick_breaking",
        story="a score of 0 was thought to count nothing, as in other forms",
        anchor='s = tl.where(keep, s, -float("inf"))',
        patch="s = tl.where(keep, s, 0.0)",
    ),
    TritonBug(
        name="what is left in base 2",
        attention="stick_breaking",
        story="lse is a natural logarithm",
        anchor="-rest * LN2",
        patch="-rest",
    ),
)
