"""Ways to give chunks of rows to ranks, side by side: which keys each of them moves, and what need not wait.

All ranks get as many rows and as much work. Three ways are tried, and the estimate of the whole call decides
(`plan`): one run of rows for each rank, which moves the fewest keys; that, with chunks exchanged until the
work is even, and the keys to wait for are few; chunks longest first to the rank with the least, which under a
causal mask is the zigzag of ring attention.

They are looked at together: arrays have an axis of ways in front, and nothing loops over chunks, tiles or
keys, so that a plan costs the host some hundred calls of numpy, whatever its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heapreplace
from math import gcd
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attnc.distributed.estimate import Rates, Strategy, TimeEstimate, pipeline_seconds
from attnc.distributed.exchange import Exchange
from attnc.distributed.spans import BLOCK, TILE, Bools, CallSizes, Ints, TileSpans, Widths

# --- chunks given to ranks ----------------------------------------------------------------------------------


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
    """Returns how many rows a chunk has: whole tiles where every rank gets one, else whole blocks."""
    step = TILE if rows >= TILE * ranks else BLOCK
    return max(-(-rows // (ranks * CHUNKS * step)), 1) * step


def chunk_of_slices(rows: int, ranks: int) -> int:
    """Returns how many rows a chunk has where those of a rank follow those of the one before, as many on each
    (the last ones fewer), as DTensors are sharded. Raises ValueError where they are no whole blocks.
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
    """Returns how many rows a tile has, of which chunks of this size are whole numbers."""
    tile = min(TILE, size)
    return tile if size % tile == 0 else gcd(TILE, size)


def group_into_chunks(tiles: TileSpans, queries: int, keys: int, size: int) -> Chunks:
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
    """Returns the rank of each chunk, where rows lie in slices (`chunk_of_slices`)."""
    own = -(-int(chunks.rows.sum()) // ranks)
    return {"slices": np.arange(len(chunks.rows), dtype=np.int64) * chunks.size // max(own, 1)}


def assignments(
    chunks: Chunks, ranks: int, seen: Bools | None = None, waiting: float = 0.0
) -> dict[str, Ints]:
    """Returns the rank of each chunk, in each way that is worth an estimate.

    seen, waiting: whose keys each chunk sees, where keys are owned with the queries of their tokens, and how
    many scores are computed in the time in which the keys of a chunk come.
    """
    together = contiguous(len(chunks.work), ranks)
    found = {"contiguous": together}
    if _excess(chunks, together, ranks) > EVEN:
        found["longest first"] = longest_first(chunks, ranks)
        if (even := even_out(chunks, ranks)) is not None:
            found["evened"] = even
        elif chunks.density < SPARSE:  # else most keys move whoever owns what
            if seen is None:
                found["exchanged"] = exchange_chunks(chunks, together, ranks)
            else:
                exchange = Exchange(chunks.work, seen, together, ranks, waiting=waiting, even=EVEN)
                found["exchanged"] = exchange.improve()
    return found


def contiguous(count: int, ranks: int) -> Ints:
    """Runs of as many chunks each, or one more."""
    return np.arange(count, dtype=np.int64) * ranks // max(count, 1)


def even_out(chunks: Chunks, ranks: int) -> Ints | None:
    """Returns runs of as many chunks each, but for chunks at one end that compute less than all others, as
    the first of a window do: the emptiest of them are dealt out, so that all ranks have as much less. None
    where no chunks are so, or runs are even.
    """
    count, work, runs = len(chunks.work), chunks.work, contiguous(len(chunks.work), ranks)
    if ranks == 1 or count < 4 * ranks or chunks.density >= SPARSE or np.ptp(chunks.rows):
        return None
    if _excess(chunks, runs, ranks) <= EVEN:
        return None
    less, little = np.sort(work)[count // 2] - work, EVEN * work.max()
    light = np.flatnonzero(less > little)
    if not 0 < len(light) * ranks <= count or less.min() < -little or np.ptp(light) >= len(light):
        return None
    if light[0] == 0:
        emptiest, takers = light, range(ranks - 1, 0, -1)
    elif light[-1] == count - 1:
        emptiest, takers = light[::-1], range(ranks - 1)
    else:
        return None
    owner, given, share = np.full(count, -1), 0, less[light].sum() / ranks
    for rank in takers:
        taken = 0.0
        while taken < 0.75 * share and given < len(light):
            chunk = emptiest[given]
            owner[chunk], taken, given = rank, taken + less[chunk], given + 1
    room = np.bincount(runs) - np.bincount(owner[owner >= 0], minlength=ranks)
    owner[owner < 0] = np.repeat(np.arange(ranks), room)
    return owner


def longest_first(chunks: Chunks, ranks: int) -> Ints:
    """Returns the rank of each chunk: each goes to the one with least work of those that have room (Graham's
    rule with equal counts).
    """
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


# --- ways side by side --------------------------------------------------------------------------------------


Floats: TypeAlias = npt.NDArray[np.float64]

#: A rank's work that has to be ready for a launch of its own.
_WORTH = 0.15


class VisibleKeys:
    """Which keys the chunks of one call see. Keys are looked at in runs of blocks that no tile and no owner
    divides.

    size: rows of a chunk; slices: keys of a rank where they lie in slices that are no chunks'; edges: the
    first block of each run, and how many blocks there are; keys: of each run.
    """

    def __init__(
        self, tiles: TileSpans, size: int, sizes: CallSizes, ranks: int, *, tied: bool, slices: int
    ) -> None:
        self.size, self.ranks, self.tied, self._slices = size, ranks, tied, slices // BLOCK
        self._chunks = -(-sizes.queries // size)
        blocks = -(-sizes.keys // BLOCK)
        some = tiles.lo < tiles.hi
        row, lo, hi = (x if some.all() else x[some] for x in (tiles.row, tiles.lo, tiles.hi))
        self._spans = _merge_touching(row // size, lo // BLOCK, -(-hi // BLOCK))
        self._chunk, first, stop = self._spans
        if tiles.seen is not None:
            self._chunk, first = tiles.row[tiles.seen[0]] // size, tiles.seen[1]
            stop = first + 1
        is_edge = np.zeros(blocks + 1, np.bool_)
        is_edge[first] = is_edge[stop] = True
        is_edge[:: size // BLOCK if tied else blocks + 1] = True
        is_edge[-(-np.arange(ranks + 1) * blocks // ranks)] = True
        is_edge[:: self._slices or blocks + 1] = True
        self.edges = is_edge.nonzero()[0]
        self._run = is_edge.cumsum() - 1  # of each block
        self._first, self._stop = self._run[first], self._run[stop]
        self.keys = np.diff(self.edges) * BLOCK
        self._keys = sizes.keys
        if blocks:
            self.keys[-1] -= blocks * BLOCK - sizes.keys

    def owners(self, owner: Ints) -> Ints:
        """Returns the rank of each run of keys: that of the same token, or runs of equal length. owner: of
        each chunk, [ways, chunks].
        """
        first = self.edges[:-1]
        if self.tied:
            return np.asarray(owner[:, first * BLOCK // self.size])
        if self._slices:
            return np.tile(first // self._slices, (len(owner), 1))
        return np.tile(first * self.ranks // max(int(self.edges[-1]), 1), (len(owner), 1))

    def find_seen(self, group: Ints, groups: int) -> Bools:
        """Returns which runs are seen by the chunks of each group, [ways, groups, runs]. group: [ways,
        chunks].
        """
        width = len(self.edges)
        row = (group[:, self._chunk] + np.arange(len(group))[:, None] * groups) * width
        cells = len(group) * groups * width
        change = np.bincount((row + self._first).ravel(), minlength=cells)
        change -= np.bincount((row + self._stop).ravel(), minlength=cells)
        return np.asarray(change.reshape(len(group), groups, width).cumsum(axis=2)[:, :, :-1] > 0)

    def seen_chunks(self) -> Bools:
        """Returns whose keys each chunk sees, where keys are owned with the queries of their tokens."""
        chunk, first, stop = self._spans
        blocks = self.size // BLOCK
        change = np.zeros((self._chunks, self._chunks + 1), np.int64)
        np.add.at(change, (chunk, first // blocks), 1)
        np.add.at(change, (chunk, -(-stop // blocks)), -1)
        return np.asarray(change.cumsum(axis=1)[:, :-1] > 0)

    def by_block(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns values of runs, which are the last axis, as values of blocks."""
        return np.repeat(x, np.diff(self.edges), axis=-1)

    def bounds(self, offer: Offer) -> Ints:
        """Returns the first key of each rank's stretch, and the one behind the last, [ranks, 2]; 0, 0 for
        none.
        """
        number = stretches(offer.key_owner)
        lo, hi = number.searchsorted(offer.stretch), number.searchsorted(offer.stretch, "right")
        ends = np.minimum(self.edges * BLOCK, self._keys)
        return np.where(offer.stretch[:, None] < 0, 0, ends[np.array((lo, hi)).T])

    @cached_property
    def spans(self) -> Ints:
        """Returns the first key that each chunk sees, and the one behind the last, [chunks, 2]; 0, 0 for
        none.
        """
        lo, hi = self.ends
        ends = np.minimum(self.edges * BLOCK, self._keys)
        some = lo <= hi
        return np.stack((ends[np.where(some, lo, 0)] * some, ends[np.where(some, hi + 1, 0)] * some), axis=1)

    @cached_property
    def ends(self) -> tuple[Ints, Ints]:
        chunk, first, stop = self._spans
        lo, hi = np.full(self._chunks, len(self.edges)), np.full(self._chunks, -1)
        np.minimum.at(lo, chunk, self._run[first])
        np.maximum.at(hi, chunk, self._run[stop - 1])
        return lo, hi


def _merge_touching(chunk: Ints, first: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    if not len(chunk):
        return chunk, first, stop
    apart = np.ones(len(chunk), np.bool_)
    np.not_equal(chunk[1:], chunk[:-1], out=apart[1:])
    apart[1:] |= (first[1:] > stop[:-1]) | (stop[1:] < first[:-1])
    at = apart.nonzero()[0]
    return chunk[at], np.minimum.reduceat(first, at), np.maximum.reduceat(stop, at)


@dataclass(frozen=True, slots=True)
class Offer:
    """A way to give chunks to ranks.

    owner: the rank of each chunk; key_owner: of each run of keys; needed: runs that the rows of each rank
    see; of each rank, load: scores, rows: queries, keys: that it has, own: of these those that its rows see,
    received: keys of others that they see, sent: its keys that rows of others see; ready: chunks that see one
    stretch of their owner's keys alone, stretch[rank], or none where that is -1; share: of the work of any
    rank that waits for others, the least that is ready; in_slices: whether what is ready follows each other
    among the rows of every rank, and so does what is not.
    """

    name: str
    owner: Ints
    key_owner: Ints
    needed: Bools
    load: list[float]
    rows: list[int]
    keys: list[int]
    own: list[int]
    received: list[int]
    sent: list[int]
    ready: Bools
    stretch: Ints
    share: float
    in_slices: bool


def offers(needs: VisibleKeys, chunks: Chunks, ways: Mapping[str, Ints]) -> list[Offer]:
    """Returns the offer of each way. ways: the rank of each chunk, by name."""
    ranks = np.arange(needs.ranks)
    owner = np.array(tuple(ways.values()))
    key_owner, needed = needs.owners(owner), needs.find_seen(owner, needs.ranks)
    mine = (owner[:, None] == ranks[:, None]).astype(np.float64)  # [ways, ranks, chunks]
    load, rows = mine @ chunks.work, mine @ chunks.rows
    keys = (key_owner[:, None] == ranks[:, None]) * needs.keys  # [ways, ranks, runs]
    pairs = needed.astype(np.float64) @ keys.astype(np.float64).transpose(0, 2, 1)
    own = pairs.diagonal(axis1=1, axis2=2)
    numbers = (rows, keys.sum(2), own, pairs.sum(2) - own, pairs.sum(1) - own)
    ready, stretch, share = _ready(needs, owner, key_owner, chunks.work, load)
    in_slices = _are_slices(owner, ready, needs.ranks).tolist() if share.any() else [False] * len(owner)
    lists = load.tolist(), *(x.astype(np.int64).tolist() for x in numbers)
    figures = owner, key_owner, needed, *lists, ready, stretch, share.tolist(), in_slices
    return [Offer(*figures_of_way) for figures_of_way in zip(ways, *figures, strict=True)]


def _ready(
    needs: VisibleKeys, owner: Ints, key_owner: Ints, work: Floats, load: Floats
) -> tuple[Bools, Ints, Floats]:
    """Returns the chunks that see one stretch of their owner's keys, for each rank those of the stretch with
    most work, if that is worth a launch: [ways, chunks]; which stretch, [ways, ranks]; the least share,
    [ways].
    """
    count, ranks = load.shape
    if not owner.size or not key_owner.size:
        return np.zeros(owner.shape, np.bool_), np.full(load.shape, -1), np.zeros(count)
    stretch = stretches(key_owner)
    first, last = needs.ends
    some = first <= last
    first = np.minimum(first, len(needs.keys) - 1)
    own = stretch[:, first]
    inside = some & (own == stretch[:, last]) & (key_owner[:, first] == owner)
    width = int(stretch[:, -1].max()) + 1
    at = (np.arange(count)[:, None] * ranks + owner) * width + own
    found = np.bincount(at.ravel(), (work * inside).ravel(), count * ranks * width)
    found = found.reshape(count, ranks, width)
    best, most = found.argmax(axis=2), found.max(axis=2)
    worth = (load > 0) & (most >= _WORTH * load)
    if not worth.any():
        best[:] = -1
        return np.zeros(owner.shape, np.bool_), best, np.zeros(count)
    best[~worth] = -1
    chosen = best[np.arange(count)[:, None], owner]
    ready = np.where(some, inside & (own == chosen), chosen >= 0)
    share = np.where(worth, most, 0.0) / np.maximum(load, 1.0)
    return ready, best, np.where(share < 1.0 - 1e-9, share, 1.0).min(axis=1)


def _are_slices(owner: Ints, ready: Bools, ranks: int) -> Bools:
    """Returns whether the rows of every rank are ready up to one of its chunks, or from one on: [ways]."""
    way = np.arange(len(owner))[:, None]
    at = way, owner.argsort(axis=1, kind="stable")
    ready, owner = ready[at], owner[at]
    changes = (ready[:, 1:] != ready[:, :-1]) & (owner[:, 1:] == owner[:, :-1])
    group = owner[:, 1:] + way * ranks
    count = np.bincount(group.ravel(), changes.ravel(), len(owner) * ranks)
    return np.asarray(count.reshape(-1, ranks).max(axis=1) <= 1)


def stretches(key_owner: Ints) -> Ints:
    """Returns the number of the stretch that each run of keys is in: runs of one owner that follow each
    other.
    """
    changes = np.zeros(key_owner.shape, np.int64)
    np.not_equal(key_owner[..., 1:], key_owner[..., :-1], out=changes[..., 1:], casting="unsafe")
    return changes.cumsum(axis=-1)


def estimate(
    strategy: Strategy,
    ways: int,
    offer: Offer,
    run_keys: Ints,
    sizes: CallSizes,
    widths: Widths,
    rates: Rates,
    groups: int | None = None,
) -> TimeEstimate:
    """Estimates a strategy with so many ranks that share the heads, for the owners of an offer.

    run_keys: how many keys each run has; groups: parts that follow each other, in place of those that take
    least time.
    """
    offered, refusal = _parts(sizes, ways, groups)
    if refusal:
        return TimeEstimate(strategy=strategy, owners=offer.name, ways=ways, refusal=refusal)
    unit = sizes.batch * widths.bytes  # bytes of a column of all sequences
    key = unit * sizes.kv_heads // ways * (widths.d + widths.dv)
    column = unit * sizes.heads // ways  # of all heads that a rank computes, in a row of q or o
    received, sent = ([key * x for x in some] for some in _keys_moved(strategy, ways, offer, run_keys))
    most, leaving, returned = max(received), 0, 0
    if ways > 1:  # rows of q to those who compute some of the heads, and of o back
        of_mates = [sum(offer.rows[r // ways * ways :][:ways]) - rows for r, rows in enumerate(offer.rows)]
        to_mates = [(ways - 1) * rows for rows in offer.rows]
        received = [x + column * widths.d * rows for x, rows in zip(received, of_mates, strict=True)]
        sent = [x + column * widths.d * rows for x, rows in zip(sent, to_mates, strict=True)]
        leaving = column * widths.dv * max(*of_mates, *to_mates)
        returned = column * widths.dv * sum(of_mates)
        most += (
            column
            * (widths.d + widths.dv)
            * max(x + rows for x, rows in zip(of_mates, offer.rows, strict=True))
        )
    moved = sum(received) + returned
    load = max(sum(offer.load[r : r + ways]) / ways for r in range(0, len(offer.load), ways))
    compute = 2.0 * load * sizes.batch * sizes.heads * (widths.d + widths.dv) / rates.compute
    seconds_in, seconds_out = max(*received, *sent) / rates.link, leaving / rates.link
    # Every row waits, and with it the rank's own keys, which are copied to those that arrive and again into
    # the window, as rows of q and o are; or some do not, and those that are no slice are copied, as is what
    # is computed of them.
    own = max(offer.own) * unit * sizes.kv_heads * (widths.d + widths.dv) if moved else 0
    cases = [(True, compute, 0.0, 4.0 * (most + own) / rates.memory)]
    if strategy == "need" and offer.share:
        row = unit * sizes.heads * (widths.d + widths.dv)  # of q and of o
        copied = 0.0 if offer.in_slices else 2.0 * max(offer.rows) * row / rates.memory
        cases.append((False, compute + copied, (compute + copied) * offer.share, 4.0 * most / rates.memory))
    total, waits, count = min(
        (pipeline_seconds(busy, ready, seconds_in, seconds_out, packing, count, rates), waits, count)
        for waits, busy, ready, packing in cases
        for count in offered
    )
    return TimeEstimate(
        strategy=strategy,
        owners=offer.name,
        ways=ways,
        groups=count,
        splits=not waits,
        compute=compute,
        exchange=seconds_in + seconds_out,
        exposed=total - compute,
        total=total,
        bytes=moved,
    )


def scores_of_keys(rows: int, sizes: CallSizes, widths: Widths, rates: Rates) -> float:
    """Counts the scores of a head that are computed in the time in which so many keys come and are put in
    order.
    """
    seconds = rows * sizes.kv_heads * widths.bytes * (1.0 / rates.link + 4.0 / rates.memory)
    return seconds * rates.compute / (2.0 * sizes.heads)


def _keys_moved(strategy: Strategy, ways: int, offer: Offer, run_keys: Ints) -> tuple[list[int], list[int]]:
    ranks = len(offer.keys)
    if strategy in ("gather", "heads"):
        total = sum(offer.keys)
        return [total - own for own in offer.keys], [(ranks - 1) * own for own in offer.keys]
    if ways == 1:
        return offer.received, offer.sent
    read = keys_read(offer.needed, offer.key_owner, run_keys, ways)
    own = read.diagonal()
    return (read.sum(axis=1) - own).tolist(), (read.sum(axis=0) - own).tolist()


def keys_read(needed: Bools, key_owner: Ints, keys: Ints, ways: int) -> Ints:
    """Returns keys of each owner that ranks in groups of so many read, [reader, owner]; of runs of so many
    keys.
    """
    ranks = len(needed)
    by_group = needed.reshape(ranks // ways, ways, -1).any(axis=1).astype(np.float64)
    owned = (key_owner[:, None] == np.arange(ranks)) * keys[:, None].astype(np.float64)
    return np.repeat((by_group @ owned).astype(np.int64), ways, axis=0)


def _parts(sizes: CallSizes, ways: int, groups: int | None) -> tuple[list[int], str]:
    """Counts in how many parts the heads of a rank may follow each other; or says why they cannot be shared
    out so.
    """
    if sizes.kv_heads % ways:
        return [], f"{sizes.kv_heads} K/V heads cannot be shared out to {ways} ranks"
    kv_heads = sizes.kv_heads // ways
    offered = [n for n in range(1, min(kv_heads, 8) + 1) if kv_heads % n == 0]
    if groups is None:
        return offered, ""
    if groups not in offered:
        return [], f"{kv_heads} K/V heads of a rank cannot follow each other in {groups} parts"
    return [groups], ""
