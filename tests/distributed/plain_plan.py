"""What a plan must say, found the slow way: one tile and one block of keys after the other, in sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from attnc.distributed.offers import Chunks, tile_rows
from attnc.distributed.plan import Plan
from attnc.distributed.spans import BLOCK, TileSpans, Visibility

#: Of a rank's work, what has to be ready for a launch of its own.
WORTH = 0.15


def check_plan(plan: Plan, visibility: Visibility) -> None:
    """Raises AssertionError for the first thing that the plan says otherwise."""
    tiles = visibility.tiles(plan.sizes, tile_rows(plan.chunk))
    blocks = -(-plan.sizes.keys // BLOCK)
    chunks = _blocks_of_chunks(plan, tiles)
    owners = [_key_owner(plan, block, blocks) for block in range(blocks)]
    assert plan.key_owner.tolist() == owners
    needed = [set[int]() for _ in range(plan.ranks)]
    awaited = [set[int]() for _ in range(plan.ranks)]
    for chunk, rank in enumerate(plan.owner.tolist()):
        needed[rank] |= chunks[chunk]
        if not plan.ready[chunk]:
            awaited[rank] |= chunks[chunk]
    assert [set(np.flatnonzero(row)) for row in plan.needed] == needed
    assert [set(np.flatnonzero(row)) for row in plan.awaited] == awaited
    _check_ready(plan, tiles, owners)
    _check_moved(plan, needed, owners)


def _blocks_of_chunks(plan: Plan, tiles: TileSpans) -> dict[int, set[int]]:
    found = defaultdict[int, set[int]](set)
    for tile, (row, lo, hi) in enumerate(zip(tiles.row, tiles.lo, tiles.hi, strict=True)):
        if tiles.seen is not None:
            found[row // plan.chunk] |= set(tiles.seen[1][tiles.seen[0] == tile].tolist())
        elif lo < hi:
            found[row // plan.chunk] |= set(range(lo // BLOCK, -(-hi // BLOCK)))
    return found


def _key_owner(plan: Plan, block: int, blocks: int) -> int:
    if plan.tied:
        return int(plan.owner[block * BLOCK // plan.chunk])
    if plan.in_slices:
        return block * BLOCK // -(-plan.sizes.keys // plan.ranks)
    return block * plan.ranks // blocks


def _check_ready(plan: Plan, tiles: TileSpans, owners: list[int]) -> None:
    """Chunks that see one stretch of blocks of their own rank, of the stretch with most work."""
    if not owners or not plan.chosen.splits:
        assert not plan.ready.any()
        return
    stretches = list(_stretches(owners))
    spans: dict[int, tuple[int, int]] = {}
    for row, lo, hi in zip(tiles.row.tolist(), tiles.lo.tolist(), tiles.hi.tolist(), strict=True):
        if lo < hi:
            before = spans.get(row // plan.chunk, (lo, hi))
            spans[row // plan.chunk] = min(lo, before[0]), max(hi, before[1])
    for rank in range(plan.ranks):
        mine = [chunk for chunk in range(len(plan.owner)) if plan.owner[chunk] == rank]
        total = sum(int(plan.work[chunk]) for chunk in mine)
        inside = {
            (first, stop): [
                c for c in mine
                if c in spans and first * BLOCK <= spans[c][0] and spans[c][1] <= stop * BLOCK
            ]
            for owner, first, stop in stretches if owner == rank
        }  # fmt: skip
        work = {key: sum(int(plan.work[c]) for c in some) for key, some in inside.items()}
        best = max(work, key=lambda key: (work[key], -key[0]), default=None)
        if best is None or not total or work[best] < WORTH * total:
            assert not plan.ready[mine].any()
            assert plan.runs[rank].tolist() == [0, 0]
            continue
        unseeing = [c for c in mine if c not in spans]
        assert np.flatnonzero(plan.ready[mine]).tolist() == [
            i for i, c in enumerate(mine) if c in inside[best] or c in unseeing
        ]
        assert plan.runs[rank].tolist() == [best[0] * BLOCK, min(best[1] * BLOCK, plan.sizes.keys)]


def _stretches(owners: list[int]) -> Iterator[tuple[int, int, int]]:
    """Owner, first block and the one behind the last, of blocks of one owner that follow each other."""
    first = 0
    for block in range(1, len(owners) + 1):
        if block == len(owners) or owners[block] != owners[first]:
            yield owners[first], first, block
            first = block


def _check_moved(plan: Plan, needed: list[set[int]], owners: list[int]) -> None:
    """Bytes from each rank to each other: of keys before the kernels, q with them, and o behind."""
    sizes, widths, ways = plan.sizes, plan.widths, plan.chosen.ways
    rows = [len(plan.owned_rows(rank)) for rank in range(plan.ranks)]
    for source in range(plan.ranks):
        for to in range(plan.ranks):
            mates = plan.mates(to)
            seen = set[int]().union(*(needed[mate] for mate in mates))
            if plan.chosen.strategy in ("gather", "heads"):
                seen = set(range(len(owners)))
            keys = sum(min(BLOCK, sizes.keys - block * BLOCK) for block in seen if owners[block] == source)
            moved = keys * sizes.kv_heads * (widths.d + widths.dv)
            if ways > 1 and source in mates:
                moved += sizes.heads * (rows[source] * widths.d + rows[to] * widths.dv)
            expected = 0 if source == to else moved * sizes.batch * widths.bytes / ways
            assert plan.bytes_moved[source, to] == expected


def longest_first(chunks: Chunks, ranks: int) -> list[int]:
    """Each chunk, those with most work first, to the rank with least work that has room for it."""
    count = len(chunks.work)
    room = [count // ranks + (rank < count % ranks) for rank in range(ranks)]
    load = [0.0] * ranks
    owner = [0] * count
    for chunk in sorted(range(count), key=lambda i: -chunks.work[i]):
        rank = min((r for r in range(ranks) if room[r]), key=lambda r: load[r])
        owner[chunk] = rank
        room[rank] -= 1
        load[rank] += float(chunks.work[chunk])
    return owner
