"""Cases that follow from what a call is as a whole: heads in sections, splits that groups of threads join,
and rounds of queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from attnc.expr.nodes import Dim
from attnc.plan.lists import listing_of
from attnc.verify.case import Case
from attnc.verify.cover import Space
from attnc.verify.rounds import has_rounds
from attnc.verify.strategies import Limits, free_dims

#: Entries of a list that is short, and sizes that are not of lists alone.
FEW, SEQUENCES = 4, ("B", "H", "Hkv", "G", "M", "N")


def cases_of_calls(space: Space, limits: Limits) -> Iterator[Case]:
    """Yields these cases."""
    yield from _in_sections(space, limits)
    yield from _joined_by_groups(space)
    yield from _in_rounds(space)


def with_lists(space: Space, case: Case, keys: int) -> Case:
    """Returns a case with lists for all queries, which have entries for so many keys, and several."""
    listing = listing_of(space.attention)
    if listing is None:
        return case
    extents, dims = listing.condition.extents, dict(case.dims)
    wanted = {extents[-1]: max(-(-keys // listing.keys), FEW)}
    if listing.row_axis is not None:
        wanted[extents[listing.row_axis]] = max(-(-dims.get("M", 1) // listing.rows), 1)
    changed = {
        extent.name: most
        for extent, most in wanted.items()
        if isinstance(extent, Dim) and extent.name not in SEQUENCES and dims.get(extent.name) in (1, keys)
    }
    return replace(case, dims={**dims, **changed})


def full(space: Space) -> str:
    return "full" if "full" in space.factors.get("lengths", ()) else "drawn"


def _in_sections(space: Space, limits: Limits) -> Iterator[Case]:
    """Yields cases in which programs walk over two sections of several heads and one that is short, each walk
    in one: that with the fewest steps, of long rows of keys or of queries beside hardly any of the other.
    """
    config, left = space.usable[-1], list(space.walks)
    if not left:
        return
    found = [
        (limits.cost(case.dims, config), space.walks_in_short_sections(case), case)
        for case in (
            Case(dims=dims, seed=1, config=config, lengths=full(space)) for dims in _many_heads(space)
        )
    ]
    found.sort(key=lambda item: item[0])
    while left:
        name = left.pop(0)
        for _, short, case in found:
            if name in short and (name == "forward" or limits.includes_gradients(case.dims, config)):
                left = [other for other in left if other not in short]
                yield with_lists(space, case, 0)
                break


def _joined_by_groups(space: Space) -> Iterator[Case]:
    """Yields a case of more rows than those whose splits have a block each, each row with a key of its own in
    one of three splits: as many as there are groups, and the others saw nothing.
    """
    if not space.many_rows:
        return
    names = free_dims(space.attention)
    several = next((name for name in ("G", "H", "Hkv", "B") if name in names), "B")
    sizes = {several: space.many_rows // _JOINED_QUERIES + 1, "M": _JOINED_QUERIES}
    for number in space.usable:
        shape = space.configs[number]
        if space.joins_by_groups(shape):
            sizes["N"] = _GROUPS * shape.BLOCK_N
            dims = {name: sizes.get(name, 1) for name in names}
            yield Case(dims=dims, seed=5, config=number, logits="own_key", lengths=full(space))
            return


def _in_rounds(space: Space) -> Iterator[Case]:
    """Yields a case of so many sequences that sums have few copies, and rounds few queries."""
    if not has_rounds(space.call):
        return
    for sequences in _OF_ROUNDS:
        dims = {name: {"B": sequences, "M": 3, "N": 5}.get(name, 1) for name in free_dims(space.attention)}
        case = with_lists(space, Case(dims=dims, seed=1, config=space.usable[-1], lengths=full(space)), 5)
        if space.ends_in_a_short_round(case):
            yield case
            return


#: Sequences that leave two copies of sums, for tiles of 16, 32 and 64 heads.
_OF_ROUNDS = (43, 32, 22)
#: Queries of each head of such a case, and groups of threads of a row.
_JOINED_QUERIES, _GROUPS = 4, 3


def _many_heads(space: Space) -> Iterator[dict[str, int]]:
    """Yields sizes of many heads, or of as many sequences: heads may be fixed, or keys have but one."""
    names = free_dims(space.attention)
    several = [*[name for name in ("H", "Hkv", "G") if name in names][:1], "B"]
    for many, long, heads in product(several, _LONG, _HEADS):
        for sizes in ({"M": 3, "N": long}, {"M": long, "N": 3}):
            yield {name: {**sizes, many: heads}.get(name, 1) for name in names}


#: Rows of which some fill a cache that is small, and heads of two sections and one more.
_LONG, _HEADS = (3, 12, 24, 48, 64, 96, 128, 192, 256, 384, 512, 1024), (5, 7, 9, 13, 17, 33)
