"""Sizes of a call to its plan: the owners of rows, the work of each rank, the transfers, and the strategy.

Plain integers on the host, the same on every rank: nothing is asked of a device, and no rank asks another.

A rank computes a rectangle of rows and heads. `need` gives it its own rows with all heads, `heads` all rows
with some heads, `mixed` the rows of some ranks with some heads; from the rectangles follow the rows of q, k
and v that it has to be sent, so that one engine runs them all.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from attnc.distributed.estimate import STRATEGIES, Rates, Strategy, TimeEstimate
from attnc.distributed.offers import (
    Offer,
    VisibleKeys,
    assignments,
    chunk_of_slices,
    chunk_rows,
    estimate,
    even_out,
    group_into_chunks,
    keys_read,
    offers,
    scores_of_keys,
    slices,
    tile_rows,
)
from attnc.distributed.spans import BLOCK, TILE, Bools, CallSizes, Ints, Visibility, Widths
from attnc.model.dtypes import DType

#: Estimates as close as this are the same.
_TIE = 0.005
#: Keys that no row sees, between those of some rows and others, for which these are computed apart.
_APART = 4096


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a rank's rectangle that are computed together, against the keys lo .. hi - 1.

    rows: which of `Plan.rows`, ascending; ready: these keys are one run of the rank's own, so that nothing
    has to arrive, and no buffer is filled; kept: the keys, ascending, where some of lo .. hi - 1 are left
    out, else None; at: where they begin in the window of all rows that wait.
    """

    rows: Ints
    lo: int
    hi: int
    ready: bool
    kept: Ints | None = None
    at: int = 0

    @property
    def keys(self) -> Ints:
        return np.arange(self.lo, self.hi) if self.kept is None else self.kept


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What one call does on every rank.

    chunk: rows of a chunk of queries; owner: the rank of each chunk; key_owner: of each block of `BLOCK`
    keys; work: scores that each chunk computes; needed: for each rank, which blocks of keys its own rows see;
    ready: the chunks that see one run of their owner's keys alone, the run of rank r being runs[r]; awaited:
    `needed` by the other chunks; chosen: the strategy; estimates: of all strategies; tied: whether row i of q
    and row i of k are one token; spans: the first key that each chunk sees, and the one behind the last,
    [chunks, 2]; by_order: whether keys that no row of a rank sees may be left out between others
    (`derive.keeps_order`).
    """

    ranks: int
    sizes: CallSizes
    widths: Widths
    chunk: int
    owner: Ints
    key_owner: Ints
    work: Ints
    needed: Bools
    ready: Bools
    runs: Ints
    awaited: Bools
    chosen: TimeEstimate
    estimates: tuple[TimeEstimate, ...]
    tied: bool
    spans: Ints
    by_order: bool
    _rows: dict[object, Ints] = field(default_factory=dict, repr=False)

    @property
    def in_slices(self) -> bool:
        return self.chosen.owners == "slices"

    # What a rank owns and computes

    def owned_rows(self, rank: int) -> Ints:
        return self._remember(
            ("q", rank), lambda: _rows_of(self.owner == rank, self.chunk, self.sizes.queries)
        )

    def owned_keys(self, rank: int) -> Ints:
        return self._remember(("k", rank), lambda: _rows_of(self.key_owner == rank, BLOCK, self.sizes.keys))

    def mates(self, rank: int) -> range:
        """Returns the ranks whose rows the rank computes, sharing the heads with them."""
        ways = self.chosen.ways
        return range(rank // ways * ways, rank // ways * ways + ways)

    def rows(self, rank: int) -> Ints:
        mates = self.mates(rank)
        if len(mates) == 1:
            return self.owned_rows(rank)
        return self._remember(
            ("rows", mates.start), lambda: np.sort(np.concatenate([self.owned_rows(mate) for mate in mates]))
        )

    def heads(self, rank: int, group: int) -> tuple[int, int]:
        """Returns the K/V heads that the rank computes in one part of the pipeline: first, and how many."""
        width = self.sizes.kv_heads // (self.chosen.ways * self.chosen.groups)
        share = rank % self.chosen.ways
        return (share * self.chosen.groups + group) * width, width

    def keys(self, rank: int) -> Ints:
        """Returns rows of k and v that the rows which wait see, or with `gather` all there are; ascending.
        None are past the last packed sequence, where memory may hold anything.
        """

        def compute() -> Ints:
            if self.chosen.strategy == "gather" and len(self.rows(rank)):
                return np.arange(self.last_key, dtype=np.int64)
            seen = self.awaited[self.mates(rank).start : self.mates(rank).stop].any(axis=0)
            return _rows_of(seen, BLOCK, self.last_key)

        return self._remember(("keys", self.mates(rank).start), compute)

    def window(self, rank: int) -> tuple[int, int]:
        """Returns the range of keys, first and past the last, that waiting rows are computed against. It
        begins where a tile of keys does on one GPU, so that sums have the same order, and where a rank has
        all rows of some heads with the first one, so that dropout counts from there.
        """
        keys = self.keys(rank)
        if not len(keys):
            return 0, 0
        first = 0 if self.chosen.strategy == "heads" else int(keys[0]) // TILE * TILE
        return first, int(keys[-1]) + 1

    def kept(self, rank: int) -> Ints | None:
        """Returns the keys of the window that waiting rows are computed against, ascending; None: all of it.

        If the mask compares positions with each other alone, tiles that no row sees are left out. The tile of
        a row's own position stays, so that keys before it stay before it. Otherwise the longest run
        between the keys of some rows and those of the others is left out (`_cut`).
        """
        if (cut := self._cut(rank)) is not None:
            (lo, hi), (_, first_hi, second_lo) = self.window(rank), cut
            return np.asarray(np.concatenate((np.arange(lo, first_hi), np.arange(second_lo, hi))))
        if not self.by_order or self.chosen.strategy == "heads":
            return None

        def compute() -> Ints:
            lo, hi = self.window(rank)
            seen = np.zeros(-(-hi // TILE), np.bool_)
            at = self.places(self.rows(rank)[self._ready_rows(rank)[1]])
            seen[self.keys(rank) // TILE] = seen[at[(lo <= at) & (at < hi)] // TILE] = True
            return _rows_of(seen, TILE, hi)

        kept, (lo, hi) = self._remember(("kept", self.mates(rank).start), compute), self.window(rank)
        return None if len(kept) == hi - lo else kept

    def places(self, rows: Ints) -> Ints:
        ends_q, ends_k = self.sizes.ends_q, self.sizes.ends_k
        if ends_q is None or ends_k is None:
            return rows + (self.sizes.keys - self.sizes.queries)
        b = np.searchsorted(ends_q, rows, "right")
        return np.asarray(rows - ends_q[b] + ends_k[b])

    def parts(self, rank: int) -> tuple[RowGroup, ...]:
        """Returns the groups of rows that the rank computes, first those that wait for nothing. Rows past the
        last packed sequence are in none.
        """
        ready, waits = self._ready_rows(rank)
        found = []
        if len(ready):
            lo, hi = self.runs[rank].tolist()
            found.append(RowGroup(ready, lo, min(hi, self.last_key), True))
        if len(waits) and (cut := self._cut(rank)) is not None:
            (lo, hi), (is_first, first_hi, second_lo) = self.window(rank), cut
            found.append(RowGroup(waits[is_first], lo, first_hi, False))
            found.append(RowGroup(waits[~is_first], second_lo, hi, False, at=first_hi - lo))
        elif len(waits):
            found.append(RowGroup(waits, *self.window(rank), False, self.kept(rank)))
        return tuple(found)

    def _cut(self, rank: int) -> tuple[Bools, int, int] | None:
        """Returns which waiting rows see keys before the longest run that none sees, where these end, and
        where the others begin; None where it is too short for two launches, or keys are left out by tiles.
        """
        if self.by_order or self.chosen.strategy != "need" or not len(self.keys(rank)):
            return None
        chunk = self.rows(rank)[self._ready_rows(rank)[1]] // self.chunk
        first, stop = self.spans[chunk].T
        nothing, begin = first == stop, self.window(rank)[0]  # rows that see nothing are in the first launch
        first, stop = np.where(nothing, begin, first), np.where(nothing, begin, stop)
        order = first.argsort(kind="stable")
        reached = np.maximum.accumulate(stop[order])
        gaps = first[order][1:] - reached[:-1]
        if not len(gaps) or gaps.max() < _APART:
            return None
        at = int(gaps.argmax())
        second = int(first[order][at + 1])
        return first < second, int(reached[at]), second // TILE * TILE

    def _ready_rows(self, rank: int) -> tuple[Ints, Ints]:
        rows = self.rows(rank)
        rows = rows[: np.searchsorted(rows, self.last_row)]
        ready = self.ready[rows // self.chunk] if len(rows) else np.zeros(0, np.bool_)
        return np.flatnonzero(ready), np.flatnonzero(~ready)

    @property
    def last_row(self) -> int:
        ends = self.sizes.ends_q
        return self.sizes.queries if ends is None else int(ends[-1])

    @property
    def last_key(self) -> int:
        ends = self.sizes.ends_k
        return self.sizes.keys if ends is None else int(ends[-1])

    def _remember(self, key: object, make: Callable[[], Ints]) -> Ints:
        if key not in self._rows:
            self._rows[key] = make()
        return self._rows[key]

    # What it amounts to

    @cached_property
    def kept_share(self) -> float:
        """Counts the bytes of the largest window in those of q, k, v and o of the same rank."""
        sizes, found = self.sizes, 0.0
        for rank in range(self.ranks):
            (lo, hi), kept = self.window(rank), self.kept(rank)
            count = (hi - lo if kept is None else len(kept)) * sizes.kv_heads / self.chosen.ways
            own = len(self.owned_rows(rank)) * sizes.heads + len(self.owned_keys(rank)) * sizes.kv_heads
            found = max(found, count / max(own, 1))
        return found

    @property
    def owner_rows(self) -> Ints:
        return np.asarray([len(self.owned_rows(rank)) for rank in range(self.ranks)])

    @cached_property
    def bytes_moved(self) -> Ints:
        """Counts the bytes of q, k, v and o from each rank to each other, [source, destination], in a
        forward.
        """
        sizes, widths, ways = self.sizes, self.widths, self.chosen.ways
        keys = np.full(len(self.key_owner), BLOCK)
        if len(keys):
            keys[-1] -= len(keys) * BLOCK - sizes.keys
        needed = self.needed
        if self.chosen.strategy in ("gather", "heads"):
            needed = np.ones_like(needed)
        found = keys_read(needed, self.key_owner, keys, ways).T * (sizes.kv_heads * (widths.d + widths.dv))
        if ways > 1:
            group, rows = np.arange(self.ranks) // ways, self.owner_rows
            rows = rows[:, None] * widths.d + rows * widths.dv
            found += (group[:, None] == group) * rows * sizes.heads
        np.fill_diagonal(found, 0)
        return found * (sizes.batch * widths.bytes) // ways

    @cached_property
    def load(self) -> npt.NDArray[np.float64]:
        own = np.bincount(self.owner, weights=self.work, minlength=self.ranks)
        return np.repeat(own.reshape(-1, self.chosen.ways).mean(axis=1), self.chosen.ways)

    @property
    def imbalance(self) -> float:
        return float(self.load.max() / self.load.mean()) if self.load.sum() else 1.0

    @cached_property
    def hash(self) -> bytes:
        state = hashlib.sha256()
        for part in (self.ranks, self.chunk, self.sizes.batch, self.sizes.queries, self.sizes.keys):
            state.update(f"{part};".encode())
        chosen = self.chosen
        state.update(f"{self.sizes.heads};{self.sizes.kv_heads};{chosen.strategy};".encode())
        state.update(f"{chosen.ways};{chosen.groups};{self.widths};{self.by_order};".encode())
        ends = (x for x in (self.sizes.ends_q, self.sizes.ends_k) if x is not None)
        for array in (self.owner, self.key_owner, self.ready, self.runs, self.awaited, *ends):
            state.update(np.ascontiguousarray(array).tobytes())
        return state.digest()


class Planner:
    """Plans of one attention, the last ones kept. Shapes, lengths and the inputs that the mask reads are the
    key.
    """

    def __init__(
        self,
        visibility: Visibility,
        widths: Widths,
        ranks: int,
        rates: Rates | None = None,
    ) -> None:
        self.visibility, self.widths, self.ranks = visibility, widths, ranks
        self.rates = rates or Rates()
        self._plans: OrderedDict[object, Plan] = OrderedDict()

    def plan(
        self,
        sizes: CallSizes,
        strategy: Strategy | None = None,
        groups: int | None = None,
        *,
        in_slices: bool = False,
    ) -> Plan:
        """Returns the plan of a call. strategy, groups: in place of the estimate's choice; in_slices: for
        rows that lie in slices of one length, whatever their work. ValueError says why one cannot be.
        """
        key = (_key(sizes), strategy, groups, in_slices)
        known = self._plans.get(key)
        if known is None:
            known = self._plans[key] = make_plan(
                self.visibility,
                sizes,
                self.widths,
                self.ranks,
                self.rates,
                strategy,
                groups,
                in_slices=in_slices,
            )
            if len(self._plans) > 256:
                self._plans.popitem(last=False)
        return known


def make_plan(
    visibility: Visibility,
    sizes: CallSizes,
    widths: Widths,
    ranks: int,
    rates: Rates,
    strategy: Strategy | None = None,
    groups: int | None = None,
    *,
    in_slices: bool = False,
) -> Plan:
    """Returns the plan whose estimate is shortest, of the strategy that is asked for.

    in_slices: rows of q, and of k, lie as `chunk_of_slices` says. Raises ValueError where that cannot be.
    """
    size = (chunk_of_slices if in_slices else chunk_rows)(sizes.queries, ranks)
    tiles = visibility.tiles(sizes, tile_rows(size))
    chunks = group_into_chunks(tiles, sizes.queries, sizes.keys, size)
    if not in_slices and size % (2 * TILE) == 0 and even_out(chunks, ranks) is not None:
        size //= 2  # the fewer rows are dealt out, the closer to even
        chunks = group_into_chunks(tiles, sizes.queries, sizes.keys, size)
    tied = is_tied(sizes)
    of_keys = 0
    if in_slices and not tied:
        chunk_of_slices(sizes.keys, ranks)
        of_keys = -(-sizes.keys // (ranks * BLOCK)) * BLOCK
    needs = VisibleKeys(tiles, size, sizes, ranks, tied=tied, slices=of_keys)
    if in_slices:
        owners = slices(chunks, ranks)
    else:
        seen, waiting = needs.seen_chunks() if tied else None, scores_of_keys(size, sizes, widths, rates)
        owners = assignments(chunks, ranks, seen, waiting)
    offered = offers(needs, chunks, owners)

    def estimate_offer(strategy: Strategy, ways: int, offer: Offer) -> TimeEstimate:
        return estimate(strategy, ways, offer, needs.keys, sizes, widths, rates, groups)

    found = [estimate_offer("need", 1, offer) for offer in offered]
    best = 0
    for i in range(1, len(found)):
        if _is_better(found[i], found[best]):
            best = i
    offer = offered[best]
    asked: list[Strategy] = [kind for kind in STRATEGIES if strategy in (None, kind)]
    made = [found[best]] if "need" in asked else []
    # The others for the same owners; where all rows meet, for those that have runs of them.
    made += [
        estimate_offer(kind, ways, offered[0] if ways == ranks else offer)
        for kind in asked
        if kind != "need"
        for ways in _ways(kind, ranks)
    ]
    if not made:
        raise ValueError(f"strategy: {strategy} is not possible here: {ranks} ranks make no groups")
    kept = {kind: min((x for x in made if x.strategy == kind), key=_total, default=None) for kind in asked}
    every = tuple(x for x in kept.values() if x is not None)
    chosen = min(every, key=_total)
    if chosen.refusal:
        raise ValueError(f"strategy: {chosen.strategy} is not possible here: {chosen.refusal}")
    offer = next(offer for offer in offered if offer.name == chosen.owners)
    ready, awaited = offer.ready & chosen.splits, offer.needed
    if ready.any():
        awaited = needs.find_seen(np.where(ready, ranks, offer.owner)[None], ranks + 1)[0, :ranks]
    return Plan(
        ranks=ranks,
        sizes=sizes,
        widths=widths,
        chunk=size,
        owner=offer.owner,
        key_owner=needs.by_block(offer.key_owner),
        work=chunks.work.astype(np.int64),
        needed=needs.by_block(offer.needed),
        ready=ready,
        runs=needs.bounds(offer),
        awaited=needs.by_block(awaited),
        chosen=chosen,
        estimates=every,
        tied=tied,
        spans=needs.spans,
        by_order=visibility.by_order,
    )


def _total(estimate: TimeEstimate) -> float:
    return estimate.total


def _is_better(found: TimeEstimate, best: TimeEstimate) -> bool:
    """Of two that take as long forward, gradients take less where fewer keys move, or work is more even."""
    if found.total < best.total * (1 - _TIE):
        return True
    even = best.compute - found.compute > 2 * _TIE * best.total and found.bytes < 1.5 * best.bytes
    return found.total < best.total * (1 + _TIE) and (found.bytes < 0.7 * best.bytes or even)


def is_tied(sizes: CallSizes) -> bool:
    """Returns whether queries and keys are the same tokens, so that who owns one owns the other."""
    if (sizes.ends_q is None) != (sizes.ends_k is None) or sizes.queries != sizes.keys:
        return False
    return sizes.ends_q is None or sizes.ends_k is None or np.array_equal(sizes.ends_q, sizes.ends_k)


def _ways(strategy: Strategy, ranks: int) -> Iterator[int]:
    match strategy:
        case "need" | "gather":
            yield 1
        case "heads":
            yield ranks
        case "mixed":
            yield from (ways for ways in range(2, ranks) if ranks % ways == 0)


def _rows_of(kept: Any, size: int, total: int) -> Ints:
    starts = np.flatnonzero(kept) * size
    rows = (starts[:, None] + np.arange(size)[None, :]).ravel()
    return rows[rows < total]


def _key(sizes: CallSizes) -> object:
    def content(x: npt.NDArray[Any] | None) -> object:
        return None if x is None else (x.dtype.str, x.shape, x.tobytes())

    tensors = tuple((name, content(x)) for name, x in sizes.tensors.items())
    numbers = (sizes.batch, sizes.queries, sizes.keys, sizes.heads, sizes.kv_heads)
    return (numbers, content(sizes.ends_q), content(sizes.ends_k), tensors, tuple(sizes.dims.items()))


def widths_of(visibility: Visibility) -> Widths:
    """Returns the widths of rows of q, k and v of a variant's attention, whose sizes are numbers."""
    from attnc.expr.construct import number

    attention = visibility.attention
    d, dv = (int(number(tensor.shape[-1]) or 0) for tensor in (attention.q, attention.v))
    assert isinstance(attention.q.dtype, DType)
    return Widths(d=d, dv=dv, bytes=attention.q.dtype.bytes)
