"""Ways to give chunks of rows to ranks, side by side: which keys each of them moves, and what need not wait.

They are looked at together: arrays have an axis of ways in front, and nothing loops over chunks, tiles or
keys, so that a plan costs the host some hundred calls of numpy, whatever its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attnc.distributed.cut import Chunks
from attnc.distributed.estimate import Estimate, Rates, Strategy, pipelined
from attnc.distributed.spans import BLOCK, Bools, Ints, Sizes, Tiles, Widths

Floats: TypeAlias = npt.NDArray[np.float64]

#: A rank's work that has to be ready for a launch of its own.
_WORTH = 0.15


class Needs:
    """Which keys the chunks of one call see. Keys are looked at in runs of blocks that no tile and no owner
    divides.

    size: rows of a chunk; slices: keys of a rank where they lie in slices that are no chunks'; edges: the
    first block of each run, and how many blocks there are; keys: of each run.
    """

    def __init__(
        self, tiles: Tiles, size: int, sizes: Sizes, ranks: int, *, tied: bool, slices: int = 0
    ) -> None:
        self.size, self.ranks, self.tied, self._slices = size, ranks, tied, slices // BLOCK
        self._chunks = -(-sizes.queries // size)
        blocks = -(-sizes.keys // BLOCK)
        some = (tiles.lo < tiles.hi).nonzero()[0]
        self._spans = tiles.row[some] // size, tiles.lo[some] // BLOCK, -(-tiles.hi[some] // BLOCK)
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
        """The rank of each run of keys: that of the same token, or runs of equal length. owner: of each
        chunk, [ways, chunks].
        """
        first = self.edges[:-1]
        if self.tied:
            return np.asarray(owner[:, first * BLOCK // self.size])
        if self._slices:
            return np.tile(first // self._slices, (len(owner), 1))
        return np.tile(first * self.ranks // max(int(self.edges[-1]), 1), (len(owner), 1))

    def seen(self, group: Ints, groups: int) -> Bools:
        """Which runs are seen by the chunks of each group, [ways, groups, runs]. group: [ways, chunks]."""
        width = len(self.edges)
        row = (group[:, self._chunk] + np.arange(len(group))[:, None] * groups) * width
        cells = len(group) * groups * width
        change = np.bincount((row + self._first).ravel(), minlength=cells)
        change -= np.bincount((row + self._stop).ravel(), minlength=cells)
        return np.asarray(change.reshape(len(group), groups, width).cumsum(axis=2)[:, :, :-1] > 0)

    def by_block(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What is said of runs, the last axis, of each block."""
        return np.repeat(x, np.diff(self.edges), axis=-1)

    def bounds(self, offer: Offer) -> Ints:
        """The first key of each rank's stretch, and the one behind the last, [ranks, 2]; 0, 0 for none."""
        number = stretches(offer.key_owner)
        lo, hi = number.searchsorted(offer.stretch), number.searchsorted(offer.stretch, "right")
        ends = np.minimum(self.edges * BLOCK, self._keys)
        return np.where(offer.stretch[:, None] < 0, 0, ends[np.array((lo, hi)).T])

    @cached_property
    def ends(self) -> tuple[Ints, Ints]:
        """The first and the last run that each chunk sees; the last one before the first if it sees none."""
        chunk, first, stop = self._spans
        lo, hi = np.full(self._chunks, len(self.edges)), np.full(self._chunks, -1)
        np.minimum.at(lo, chunk, self._run[first])
        np.maximum.at(hi, chunk, self._run[stop - 1])
        return lo, hi


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to give chunks to ranks.

    owner: the rank of each chunk; key_owner: of each run of keys; keys: of each run by owner, [runs, ranks];
    needed: runs that the rows of each rank see; pairs: keys of each owner that they see, [rank, owner];
    ready: chunks that see one stretch of their owner's keys alone, stretch[rank], or none where that is -1;
    load, rows: scores and queries of each rank; share: of the work of any rank that waits for others, the
    least that is ready; in_slices: whether what is ready follows each other among the rows of every rank, and
    so does what is not.
    """

    name: str
    owner: Ints
    key_owner: Ints
    keys: Floats
    needed: Bools
    pairs: Floats
    ready: Bools
    stretch: Ints
    load: Floats
    rows: Floats
    share: float
    in_slices: bool


def offers(needs: Needs, chunks: Chunks, ways: Mapping[str, Ints]) -> list[Offer]:
    """What each way comes to. ways: the rank of each chunk, by name."""
    ranks = np.arange(needs.ranks)
    owner = np.array(tuple(ways.values()))
    key_owner, needed = needs.owners(owner), needs.seen(owner, needs.ranks)
    mine = (owner[:, None] == ranks[:, None]).astype(np.float64)  # [ways, ranks, chunks]
    load, rows = mine @ chunks.work, mine @ chunks.rows
    keys = (key_owner[:, :, None] == ranks) * needs.keys[:, None].astype(np.float64)
    pairs = needed.astype(np.float64) @ keys
    ready, stretch, share = _ready(needs, owner, key_owner, chunks.work, load)
    in_slices = _are_slices(owner, ready, needs.ranks).tolist()
    figures = (owner, key_owner, keys, needed, pairs, ready, stretch, load, rows, share.tolist(), in_slices)
    return [Offer(*figures_of_way) for figures_of_way in zip(ways, *figures, strict=True)]


def _ready(
    needs: Needs, owner: Ints, key_owner: Ints, work: Floats, load: Floats
) -> tuple[Bools, Ints, Floats]:
    """The chunks that see one stretch of their owner's keys, for each rank those of the stretch with most
    work, if that is worth a launch: [ways, chunks]; which stretch, [ways, ranks]; the least share, [ways].
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
    found = np.bincount(at.ravel(), (work * inside).ravel(), count * ranks * width).reshape(
        count, ranks, width
    )
    best, most = found.argmax(axis=2), found.max(axis=2)
    best[(load == 0) | (most < _WORTH * load)] = -1
    chosen = np.take_along_axis(best, owner, 1)
    ready = np.where(some, inside & (own == chosen), chosen >= 0)
    share = np.where(best >= 0, most, 0.0) / np.maximum(load, 1.0)
    return ready, best, np.where(share < 1.0 - 1e-9, share, 1.0).min(axis=1)


def _are_slices(owner: Ints, ready: Bools, ranks: int) -> Bools:
    """Whether the rows of every rank are ready up to one of its chunks, or from one on: [ways]."""
    order = owner.argsort(axis=1, kind="stable")
    ready, owner = np.take_along_axis(ready, order, 1), np.take_along_axis(owner, order, 1)
    changes = (ready[:, 1:] != ready[:, :-1]) & (owner[:, 1:] == owner[:, :-1])
    group = owner[:, 1:] + np.arange(len(owner))[:, None] * ranks
    count = np.bincount(group.ravel(), changes.ravel(), len(owner) * ranks)
    return np.asarray(count.reshape(-1, ranks).max(axis=1) <= 1)


def stretches(key_owner: Ints) -> Ints:
    """The number of the stretch that each run of keys is in: runs of one owner that follow each other."""
    changes = np.zeros(key_owner.shape, np.int64)
    np.not_equal(key_owner[..., 1:], key_owner[..., :-1], out=changes[..., 1:], casting="unsafe")
    return changes.cumsum(axis=-1)


def estimates(
    kinds: Sequence[tuple[Strategy, int, Offer]],
    sizes: Sizes,
    widths: Widths,
    rates: Rates,
    groups: int | None = None,
) -> list[Estimate]:
    """Of each strategy, with so many ranks that share the heads, for the owners of an offer.

    groups: parts that follow each other, in place of those that take least time.
    """
    if not kinds:
        return []
    arriving, leaving = traffic(kinds, sizes, widths)
    moved = arriving + leaving
    figures = zip(
        moved.sum(axis=(1, 2)).tolist(),
        arriving.sum(axis=1).max(axis=1).tolist(),
        *(np.maximum(x.sum(axis=1), x.sum(axis=2)).max(axis=1).tolist() for x in (arriving, leaving)),
        strict=True,
    )
    row = sizes.batch * sizes.heads * (widths.d + widths.dv) * widths.bytes  # of q and of o
    key = sizes.batch * sizes.kv_heads * (widths.d + widths.dv) * widths.bytes
    found = []
    for (strategy, ways, offer), matrix, (all_bytes, most, most_in, most_out) in zip(
        kinds, moved, figures, strict=True
    ):
        offered, refusal = _parts(sizes, ways, groups)
        if refusal:
            found.append(Estimate(strategy=strategy, owners=offer.name, ways=ways, refusal=refusal))
            continue
        load = float(offer.load.reshape(-1, ways).mean(axis=1).max())
        compute = 2.0 * load * sizes.batch * sizes.heads * (widths.d + widths.dv) / rates.compute
        seconds_in, seconds_out = most_in / rates.link, most_out / rates.link
        # Every row waits, and with it the rank's own keys, which are copied to those that arrive; or some do
        # not, and those that are no slice are copied, as is what is computed of them.
        own = float(offer.pairs.diagonal().max(initial=0.0)) * key if all_bytes else 0.0
        cases = [(True, compute, 0.0, (4.0 * most + 2.0 * own) / rates.memory)]
        if strategy == "need" and offer.share:
            copied = 0.0 if offer.in_slices else 2.0 * float(offer.rows.max()) * row / rates.memory
            cases.append(
                (False, compute + copied, (compute + copied) * offer.share, 4.0 * most / rates.memory)
            )
        total, waits, count = min(
            (total, waits, count)
            for waits, busy, ready, packing in cases
            for count in offered
            for total in (pipelined(busy, ready, seconds_in, seconds_out, packing, count, rates),)
        )
        found.append(
            Estimate(
                strategy=strategy,
                owners=offer.name,
                ways=ways,
                groups=count,
                splits=not waits,
                compute=compute,
                exchange=seconds_in + seconds_out,
                exposed=total - compute,
                total=total,
                bytes=int(all_bytes),
                moved=matrix.astype(np.int64),
            )
        )
    return found


def traffic(
    kinds: Sequence[tuple[Strategy, int, Offer]], sizes: Sizes, widths: Widths
) -> tuple[Floats, Floats]:
    """Bytes of q, k and v before the kernels, and of o after them, [strategies, source, destination]."""
    ranks = len(kinds[0][2].load)
    ways = np.asarray([ways for _, ways, _ in kinds])
    element = (sizes.batch * widths.bytes / ways)[:, None, None] * (1.0 - np.eye(ranks))
    pairs = np.array([_pairs(*kind) for kind in kinds])
    arriving = pairs.transpose(0, 2, 1) * (sizes.kv_heads * (widths.d + widths.dv) * element)
    if (ways == 1).all():
        return arriving, np.zeros_like(arriving)
    group = np.arange(ranks) // ways[:, None]
    mates = (ways > 1)[:, None, None] & (group[:, :, None] == group[:, None, :])
    rows = np.array([offer.rows for _, _, offer in kinds])
    arriving += mates * rows[:, :, None] * (sizes.heads * widths.d * element)
    return arriving, mates * rows[:, None, :] * (sizes.heads * widths.dv * element)


def _pairs(strategy: Strategy, ways: int, offer: Offer) -> Floats:
    """Keys that each rank reads of each owner: [reader, owner]."""
    ranks, runs = offer.needed.shape
    if strategy in ("gather", "heads"):
        return np.broadcast_to(offer.keys.sum(axis=0), (ranks, ranks))
    if ways == 1:
        return offer.pairs
    needed = offer.needed.reshape(ranks // ways, ways, runs).any(axis=1).astype(np.float64)
    return np.repeat(needed @ offer.keys, ways, axis=0)


def _parts(sizes: Sizes, ways: int, groups: int | None) -> tuple[list[int], str]:
    """In how many parts the heads of a rank may follow each other; or why they cannot be shared out so."""
    if sizes.kv_heads % ways:
        return [], f"{sizes.kv_heads} K/V heads cannot be shared out to {ways} ranks"
    kv_heads = sizes.kv_heads // ways
    offered = [n for n in range(1, min(kv_heads, 8) + 1) if kv_heads % n == 0]
    if groups is None:
        return offered, ""
    if groups not in offered:
        return [], f"{kv_heads} K/V heads of a rank cannot follow each other in {groups} parts"
    return [groups], ""
