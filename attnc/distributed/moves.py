"""What moves between ranks in a call, and back: rows of q, k and v to who computes with them, results home.

Tensors have any layout; rows are those of the axis that ranks share out. What a rank has for itself is copied
where it is and never sent. Which rows go where is said by index tensors on the device, made once from a
plan's numbers and used by every call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from attnc.distributed.group import Ranks, SharedBytes
from attnc.distributed.plan import Plan
from attnc.distributed.spans import BLOCK, Ints
from attnc.model.attention import Attention
from attnc.model.tensors import Role, Tensor

# --- rows as index tensors ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Rows of a tensor: a slice where they follow each other, else an index. What is done with no rows calls
    nothing: most pairs of ranks have none for each other.
    """

    first: int
    count: int
    index: torch.Tensor | None

    def take(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Takes these rows of x: a view where they are a slice."""
        if self.index is None:
            return x.narrow(axis, self.first, self.count)
        return x.index_select(axis, self.index)

    def copy(self, x: torch.Tensor, axis: int, into: torch.Tensor) -> None:
        if not self.count:
            return
        if self.index is None:
            into.copy_(x.narrow(axis, self.first, self.count))
        else:
            torch.index_select(x, axis, self.index, out=into)

    def put(self, x: torch.Tensor, axis: int, rows: torch.Tensor) -> None:
        if not self.count:
            return
        if self.index is None:
            x.narrow(axis, self.first, self.count).copy_(rows)
        else:
            x.index_copy_(axis, self.index, rows)

    def add(self, x: torch.Tensor, axis: int, rows: torch.Tensor) -> None:
        """Adds to these rows; none is there twice, so that sums do not depend on an order."""
        if not self.count:
            return
        if self.index is None:
            x.narrow(axis, self.first, self.count).add_(rows)
        else:
            x.index_add_(axis, self.index, rows)


def places(rows: Ints, device: torch.device) -> RowPlaces:
    """Returns the rows of these numbers."""
    count = len(rows)
    first = int(rows[0]) if count else 0
    if not count or int(rows[-1]) - first == count - 1:
        return RowPlaces(first, count, None)
    return RowPlaces(first, count, torch.as_tensor(np.ascontiguousarray(rows), device=device))


@dataclass(frozen=True, slots=True)
class Route:
    """Rows that move: sent[r] of what this rank owns go to rank r, kept[r] is where its own arrive."""

    sent: tuple[RowPlaces, ...]
    kept: tuple[RowPlaces, ...]


def key_route(plan: Plan, rank: int, device: torch.device) -> Route:
    """Routes k and v from their owners to the windows of the ranks that wait for them."""
    mine = plan.owned_keys(rank)
    ranks = range(plan.ranks)
    sent = [np.flatnonzero(np.isin(mine, plan.keys(r), assume_unique=True)) for r in ranks]
    keys = plan.keys(rank)
    first, _ = plan.window(rank)
    kept = [
        np.intersect1d(plan.owned_keys(other), keys, assume_unique=True) - first
        for other in range(plan.ranks)
    ]
    return Route(tuple(places(x, device) for x in sent), tuple(places(x, device) for x in kept))


def key_sources(plan: Plan, rank: int) -> tuple[Ints, Ints]:
    """Says of each key of a rank's window who has it, and which of the keys it is that this rank sends; -1
    for holes, which nobody sends.
    """
    first, stop = plan.window(rank)
    source, number = np.full(stop - first, -1, np.int64), np.full(stop - first, -1, np.int64)
    keys = plan.keys(rank)
    for other in range(plan.ranks):
        rows = np.intersect1d(plan.owned_keys(other), keys, assume_unique=True) - first
        source[rows], number[rows] = other, np.arange(len(rows))
    return source, number


def query_route(plan: Plan, rank: int, device: torch.device) -> Route:
    """Routes rows of q from their owners to the ranks whose rectangles have them."""
    everything = np.arange(len(plan.owned_rows(rank)))
    nothing = np.zeros(0, np.int64)
    mates = plan.mates(rank)
    rows = plan.rows(rank)
    sent = [everything if other in mates else nothing for other in range(plan.ranks)]
    kept = [
        np.searchsorted(rows, plan.owned_rows(other)) if other in mates else nothing
        for other in range(plan.ranks)
    ]
    return Route(tuple(places(x, device) for x in sent), tuple(places(x, device) for x in kept))


# --- what moves ---------------------------------------------------------------------------------------------


#: A tensor, the axis of its rows, and which of them are meant.
Rows: TypeAlias = tuple[torch.Tensor, int, RowPlaces]
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Keys on their way, for one part of the heads: the rows of k and v for each other rank, and the rank's
    own with room behind them for those of others.
    """

    sent: torch.Tensor
    came: torch.Tensor


@dataclass(frozen=True, slots=True)
class ParcelLayout:
    """How parcels are packed and opened, whatever part of the heads they are of.

    sent, came: elements; counts_out, counts_in: to and from each rank; pieces: rank, 0 for k and 1 for v,
    first element, shape; own: elements of the rank's own; unit: elements of what is moved at once when a
    parcel is opened, index: which of them make the windows; holes: whether the last one, which is zero, is
    one of them; shapes: of the windows; posts: elements from each rank to each other, where they are copied
    out of each other's memory.
    """

    sent: int
    came: int
    counts_out: Sequence[int]
    counts_in: Sequence[int]
    pieces: Sequence[tuple[int, int, int, torch.Size]]
    own: int
    unit: int
    index: torch.Tensor
    holes: bool
    shapes: tuple[torch.Size, torch.Size]
    posts: Ints | None


class Moves:
    """The exchanges of one plan. Each is a collective: every rank calls it, whatever it has."""

    def __init__(self, plan: Plan, attention: Attention, group: Ranks, device: torch.device) -> None:
        self.plan, self.attention, self.group, self.device = plan, attention, group, device
        self.rank = group.rank
        self.keys = key_route(plan, self.rank, device)
        self.queries = query_route(plan, self.rank, device)
        self._keyed = tuple((tensor, axis_of(tensor, Role.KEY)) for tensor in (attention.k, attention.v))
        self._known: ParcelLayout | None = None
        self._box: SharedBytes | None = None

    def pack_keys(self, k: torch.Tensor, v: torch.Tensor, number: int) -> Parcel:
        """Copies the rows of k and v that others need, and the rank's own that it needs itself."""
        layout = self._layout(k, v)
        if self._box is None:
            sent = torch.empty(layout.sent, dtype=k.dtype, device=self.device)
        else:
            sent = self._box.memory.view(k.dtype).narrow(0, number * layout.sent, layout.sent)
        came = torch.empty(layout.came, dtype=k.dtype, device=self.device)
        if layout.holes:  # keys that nobody asked for have to be finite
            came.narrow(0, layout.came - layout.unit, layout.unit).zero_()
        for r, which, at, size in layout.pieces:
            (tensor, axis), x = self._keyed[which], (k, v)[which]
            into = (came if r == self.rank else sent).narrow(0, at, size.numel()).view(size)
            self.keys.sent[r].copy(heads_of(tensor, x, *self.plan.heads(r, number)), axis, into)
        return Parcel(sent, came)

    def meet(self) -> None:
        """Waits for all ranks: before keys are copied out of others' memory they have to lie there, and until
        all have copied they stay.
        """
        if self._box is not None:
            self._box.meet()

    def exchange(self, parcel: Parcel, number: int) -> None:
        layout = self._known
        assert layout is not None
        if self.group.size == 1:
            return
        arriving = parcel.came.narrow(0, layout.own, sum(layout.counts_in))
        if layout.posts is None or self._box is None:
            self.group.exchange(arriving, layout.counts_in, parcel.sent, layout.counts_out)
            return
        for r, into in enumerate(torch.split(arriving, list(layout.counts_in))):
            first = number * int(layout.posts[r].sum()) + int(layout.posts[r, : self.rank].sum())
            if len(into):
                into.copy_(self._box.peers[r].view(into.dtype).narrow(0, first, len(into)))

    def open_keys(self, parcel: Parcel) -> Pair:
        """Returns the window of k and v that the waiting rows see, in the order of the keys."""
        layout = self._known
        assert layout is not None
        of_k, of_v = layout.shapes
        rows = parcel.came.view(-1, layout.unit).index_select(0, layout.index).view(-1)
        k = rows.narrow(0, 0, of_k.numel()).view(of_k)
        return k, rows.narrow(0, of_k.numel(), of_v.numel()).view(of_v)

    def _layout(self, k: torch.Tensor, v: torch.Tensor) -> ParcelLayout:
        if self._known is not None:
            return self._known
        mine = [
            (heads_of(tensor, x, *self.plan.heads(self.rank, 0)), axis)
            for (tensor, axis), x in zip(self._keyed, (k, v), strict=True)
        ]
        # A rank sends heads that another one computes, which are as many as its own.
        out, in_ = (
            [[with_rows(x, axis, at.count) for x, axis in mine] for at in places]
            for places in (self.keys.sent, self.keys.kept)
        )
        others = [r for r in range(self.plan.ranks) if r != self.rank]
        pieces, counts = list[tuple[int, int, int, torch.Size]](), list[list[int]]()
        for ranks in ([self.rank], others):
            at, begin = 0, [0] * self.plan.ranks
            for r in ranks:
                for which, size in enumerate(out[r]):
                    if size.numel():
                        pieces.append((r, which, at, size))
                    at, begin[r] = at + size.numel(), begin[r] + size.numel()
            counts.append(begin)
        own = counts[0][self.rank]
        counts_in = [0 if r == self.rank else sum(size.numel() for size in in_[r]) for r in range(len(in_))]
        unit, index, holes = self._windows(in_, [self.rank, *others])
        window = self.plan.window(self.rank)
        of_k, of_v = (with_rows(x, axis, window[1] - window[0]) for x, axis in mine)
        self._known = ParcelLayout(
            sent=sum(counts[1]),
            came=own + sum(counts_in) + unit,
            counts_out=counts[1],
            counts_in=counts_in,
            pieces=pieces,
            own=own,
            unit=unit,
            index=torch.from_numpy(index).to(self.device),
            holes=holes,
            shapes=(of_k, of_v),
            posts=self._posts(counts[1], k.element_size()),
        )
        return self._known

    def _posts(self, counts: Sequence[int], wide: int) -> Ints | None:
        """Returns `Layout.posts`, and a box that has room for all parts of the heads."""
        if not self.group.symmetric:
            return None
        every = self.group.gather(torch.tensor(counts, device=self.device)).cpu().numpy()
        most = int(every.sum(axis=1).max()) * self.plan.chosen.groups * wide
        self._box = self.group.outbox(-(-max(most, 1) // BLOCK) * BLOCK)
        return every

    def _windows(self, sizes: Sequence[Sequence[torch.Size]], order: Sequence[int]) -> tuple[int, Ints, bool]:
        """Returns the unit, the index and whether there are holes (`Layout`).

        sizes: of the rows of k and v that come from each rank; order: of the ranks, as they lie.
        """
        axes = [axis for _, axis in self._keyed]
        inner = [size[axis + 1 :].numel() for size, axis in zip(sizes[self.rank], axes, strict=True)]
        unit = math.gcd(*inner)
        source, number = key_sources(self.plan, self.rank)
        begins, end = np.zeros((self.plan.ranks, len(axes)), np.int64), 0
        for r in order:
            for which, size in enumerate(sizes[r]):
                begins[r, which], end = end, end + size.numel()
        counts, found = np.asarray([at.count for at in self.keys.kept]), []
        for which, axis in enumerate(axes):
            lead = np.arange(sizes[self.rank][which][:axis].numel())[:, None]
            first = begins[source, which] + (lead * counts[source] + number) * inner[which]
            first = np.where(source < 0, end, first)[..., None] // unit
            within = np.arange(inner[which] // unit) * (source >= 0)[:, None]
            found.append((first + within).ravel())
        return unit, np.concatenate(found), bool((source < 0).any())

    def return_keys(self, sums: Pair, totals: Pair, number: int, *, fresh: bool) -> None:
        """Sends this rank's summands of dk and dv to the owners of the keys, which add them to `totals`: what
        is their own, then rank by rank. Both are f32. fresh: there is nothing in them yet, and all is
        written.
        """
        tensors = self.attention.k, self.attention.v
        axes = [axis_of(tensor, Role.KEY) for tensor in tensors]
        sent = [[(x, axis, at) for x, axis in zip(sums, axes, strict=True)] for at in self.keys.kept]
        own = [
            heads_of(tensor, total, *self.plan.heads(self.rank, number))
            for tensor, total in zip(tensors, totals, strict=True)
        ]
        # A rank that computes other heads than this one returns those.
        came = self._swap(sent, [[(axis, at.count) for axis in axes] for at in self.keys.sent], own)
        others = [r for r in range(self.plan.ranks) if r != self.rank]
        for r in (self.rank, *others):
            at, is_own = self.keys.sent[r], r == self.rank
            rows = [places.take(x, axis) for x, axis, places in sent[r]] if is_own else came[r]
            write = at.put if is_own and fresh else at.add
            for tensor, total, axis, some in zip(tensors, totals, axes, rows, strict=True):
                write(heads_of(tensor, total, *self.plan.heads(r, number)), axis, some)

    def fetch_queries(self, tensor: Tensor, x: torch.Tensor, number: int) -> torch.Tensor:
        """Returns the rectangle's rows of q, do or dlse, for the heads of one part."""
        if self.plan.chosen.ways == 1:
            return heads_of(tensor, x, *self.heads(self.rank, number))
        axis = axis_of(tensor, Role.QUERY)
        sent = [
            [(heads_of(tensor, x, *self.heads(r, number)), axis, at)]
            for r, at in enumerate(self.queries.sent)
        ]
        mine = sent[self.rank][0]
        size = with_rows(mine[0], axis, len(self.plan.rows(self.rank)))
        made = torch.empty(size, dtype=x.dtype, device=self.device)
        came = self._swap(sent, [[(axis, at.count)] for at in self.queries.kept], [made])
        for r in self.plan.mates(self.rank):
            rows = mine[2].take(mine[0], axis) if r == self.rank else came[r][0]
            self.queries.kept[r].put(made, axis, rows)
        return made

    def return_queries(self, tensor: Tensor, made: torch.Tensor, x: torch.Tensor, number: int) -> None:
        axis = axis_of(tensor, Role.QUERY)
        sent = [[(made, axis, at)] for at in self.queries.kept]
        came = self._swap(sent, [[(axis, at.count)] for at in self.queries.sent], [made])
        for r in self.plan.mates(self.rank):
            rows = self.queries.kept[r].take(made, axis) if r == self.rank else came[r][0]
            heads_of(tensor, x, *self.heads(r, number)).copy_(rows)

    def heads(self, rank: int, number: int) -> tuple[int, int]:
        """Returns the query heads that a rank computes in one part: first, and how many."""
        group = self.plan.sizes.heads // self.plan.sizes.kv_heads
        first, count = self.plan.heads(rank, number)
        return first * group, count * group

    def _swap(
        self,
        sent: Sequence[Sequence[Rows]],
        expected: Sequence[Sequence[tuple[int, int]]],
        like: Sequence[torch.Tensor],
    ) -> list[list[torch.Tensor]]:
        """Sends rows to each rank; returns what came from each.

        expected: axis and number of rows of each tensor that comes from each rank, otherwise shaped as those
        in `like` are.
        """
        sizes_out = [
            [] if r == self.rank else [with_rows(x, axis, at.count) for x, axis, at in rows]
            for r, rows in enumerate(sent)
        ]
        sizes_in = [
            [] if r == self.rank else [with_rows(x, *some) for x, some in zip(like, rows, strict=True)]
            for r, rows in enumerate(expected)
        ]
        counts_out, counts_in = (
            [sum(size.numel() for size in some) for some in sizes] for sizes in (sizes_out, sizes_in)
        )
        sending = torch.empty(sum(counts_out), dtype=like[0].dtype, device=self.device)
        arriving = torch.empty(sum(counts_in), dtype=like[0].dtype, device=self.device)
        pieces = iter(torch.split(sending, [size.numel() for some in sizes_out for size in some]))
        for some, sizes in zip(sent, sizes_out, strict=True):
            for (x, axis, at), size in zip(some, sizes, strict=False):
                at.copy(x, axis, next(pieces).view(size))
        if self.group.size > 1:
            self.group.exchange(arriving, counts_in, sending, counts_out)
        came = iter(torch.split(arriving, [size.numel() for some in sizes_in for size in some]))
        return [[next(came).view(size) for size in some] for some in sizes_in]


def axis_of(tensor: Tensor, role: Role) -> int:
    """Returns the axis with this role, which the tensor has."""
    return tensor.roles.index(role)


def heads_of(tensor: Tensor, x: torch.Tensor, first: int, count: int) -> torch.Tensor:
    return x.narrow(axis_of(tensor, Role.HEAD), first, count)


def with_rows(x: torch.Tensor, axis: int, count: int) -> torch.Size:
    """Replaces the number of rows in a shape."""
    return torch.Size([*x.shape[:axis], count, *x.shape[axis + 1 :]])
