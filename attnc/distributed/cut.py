"""Who owns which rows: chunks of queries given to ranks so that all have as many rows and as much work.

Three ways are tried, and the estimate of the whole call decides (`plan`): one run of rows for each rank,
which moves the fewest keys; that, with chunks exchanged until the work is even; and chunks longest first to
whoever has least, which under a causal mask is the zigzag of ring attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heapreplace
from math import gcd

import numpy as np
import numpy.typing as npt

from attnc.distributed.spans import BLOCK, TILE, Ints, Tiles

#: Chunks that a rank owns, at most.
CHUNKS = 16
#: Share of all scores below which it may pay to keep chunks together; a causal mask has a half.
SPARSE = 0.4
#: Work beyond the mean that is not worth an exchange of chunks.
EVEN = 0.01


@dataclass(frozen=True, slots=True)
class Chunks:
    """Query rows cut into chunks of `size`, the last one shorter; work: scores that each chunk computes;
    density: the share of all scores that are.
    """

    size: int
    rows: Ints
    work: npt.NDArray[np.float64]
    density: float


def chunk_rows(rows: int, ranks: int) -> int:
    """Rows of a chunk: whole tiles where every rank gets one, else whole blocks."""
    step = TILE if rows >= TILE * ranks else BLOCK
    return max(-(-rows // (ranks * CHUNKS * step)), 1) * step


def chunk_of_slices(rows: int, ranks: int) -> int:
    """Rows of a chunk where those of a rank follow those of the one before, as many on each (the last ones
    fewer), as DTensors are sharded. Raises ValueError where they are no whole blocks.
    """
    own = max(-(-rows // ranks), 1)
    if own % BLOCK and own < rows:
        raise ValueError(
            f"rows: {rows} in {ranks} slices are {own} each, which is no multiple of {BLOCK}: pad them, or "
            "let the plan say where they lie"
        )
    sizes = [own // n for n in range(CHUNKS, 0, -1) if own % (n * BLOCK) == 0] or [-(-own // BLOCK) * BLOCK]
    return next((size for size in sizes if size % TILE == 0), sizes[0])


def tile_rows(size: int) -> int:
    """Rows of a tile, of which chunks of this size are whole numbers."""
    tile = min(TILE, size)
    return tile if size % tile == 0 else gcd(TILE, size)


def group_into_chunks(tiles: Tiles, queries: int, keys: int, size: int) -> Chunks:
    """Groups all rows into chunks, from tiles that end where chunks do."""
    count = -(-queries // size)
    if tiles.seen is None:
        seen = np.maximum(tiles.hi - tiles.lo, 0)
    else:
        seen = np.bincount(tiles.seen[0], minlength=len(tiles.row)) * BLOCK
    scores = (tiles.rows * seen).astype(np.float64)
    work = np.bincount(tiles.row // size, weights=scores, minlength=count).astype(np.float64)
    rows = np.minimum(np.arange(1, count + 1) * size, queries) - np.arange(count) * size
    density = float(scores.sum()) / max(float(tiles.rows.sum()) * keys, 1.0)
    return Chunks(size, rows.astype(np.int64), work, density)


def slices(chunks: Chunks, ranks: int) -> dict[str, Ints]:
    """The rank of each chunk, where rows lie in slices (`chunk_of_slices`)."""
    own = -(-int(chunks.rows.sum()) // ranks)
    return {"slices": np.arange(len(chunks.rows), dtype=np.int64) * chunks.size // max(own, 1)}


def assignments(chunks: Chunks, ranks: int) -> dict[str, Ints]:
    """The rank of each chunk, in each way that is worth an estimate."""
    together = contiguous(len(chunks.work), ranks)
    found = {"contiguous": together}
    if _excess(chunks, together, ranks) > EVEN:
        found["longest first"] = longest_first(chunks, ranks)
        if chunks.density < SPARSE:  # else most keys move whoever owns what
            found["exchanged"] = exchange_chunks(chunks, together, ranks)
    return found


def contiguous(count: int, ranks: int) -> Ints:
    """Runs of as many chunks each, or one more."""
    return np.arange(count, dtype=np.int64) * ranks // max(count, 1)


def longest_first(chunks: Chunks, ranks: int) -> Ints:
    """Each chunk to the rank with least work of those that have room (Graham's rule with equal counts)."""
    count = len(chunks.work)
    room = [count // ranks + (rank < count % ranks) for rank in range(ranks)]
    least = [(0.0, rank) for rank in range(ranks) if room[rank]]
    owner = [0] * count
    work = chunks.work.tolist()
    for chunk in np.argsort(-chunks.work, kind="stable").tolist():
        load, rank = least[0]
        owner[chunk] = rank
        room[rank] -= 1
        if room[rank]:
            heapreplace(least, (load + work[chunk], rank))
        else:
            heappop(least)
    return np.asarray(owner, np.int64)


def exchange_chunks(chunks: Chunks, start: Ints, ranks: int) -> Ints:
    """Improves an assignment by exchanges of two chunks between the ranks with most and least work."""
    owner, work = start.copy(), chunks.work
    load = np.bincount(owner, weights=work, minlength=ranks)
    mean = work.sum() / ranks
    for _ in range(2 * len(work)):
        most, least = int(load.argmax()), int(load.argmin())
        apart = load[most] - load[least]
        if load[most] <= (1 + EVEN) * mean:
            break
        give, take = np.flatnonzero(owner == most), np.flatnonzero(owner == least)
        if not len(give) or not len(take):
            break
        gain = work[give][:, None] - work[take][None, :]
        at = int(np.abs(apart - 2 * gain).argmin())
        gained = gain.ravel()[at]
        if abs(apart - 2 * gained) >= apart:
            break
        owner[give[at // len(take)]], owner[take[at % len(take)]] = least, most
        load[most] -= gained
        load[least] += gained
    return owner


def _excess(chunks: Chunks, owner: Ints, ranks: int) -> float:
    load = np.bincount(owner, weights=chunks.work, minlength=ranks)
    return float(load.max() * ranks / load.sum() - 1) if load.sum() else 0.0
