"""What moves between ranks in a call, and back: rows of q, k and v to who computes with them, results home.

Tensors have any layout; rows are those of the axis that ranks share out. What a rank has for itself is copied
where it is and never sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from attnc.distributed.group import Ranks
from attnc.distributed.plan import Plan
from attnc.distributed.rows import Places, key_route, key_sources, query_route
from attnc.model.attention import Attention
from attnc.model.tensors import Role, Tensor

#: A tensor, the axis of its rows, and which of them are meant.
Rows: TypeAlias = tuple[torch.Tensor, int, Places]
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Keys on their way, for one part of the heads.

    sent: the rows of k and v for each other rank; came: the rank's own rows, and behind them room for those
    of others; shapes: of k and v as the kernel takes them.
    """

    sent: torch.Tensor
    counts_out: Sequence[int]
    came: torch.Tensor
    counts_in: Sequence[int]
    shapes: tuple[torch.Size, torch.Size]


class Moves:
    """The exchanges of one plan. Each is a collective: every rank calls it, whatever it has."""

    def __init__(self, plan: Plan, attention: Attention, group: Ranks, device: torch.device) -> None:
        self.plan, self.attention, self.group, self.device = plan, attention, group, device
        self.rank = group.rank
        self.keys = key_route(plan, self.rank, device)
        self.queries = query_route(plan, self.rank, device)
        self._sources = key_sources(plan, self.rank)
        self._index: tuple[int, torch.Tensor] | None = None

    def pack_keys(self, k: torch.Tensor, v: torch.Tensor, number: int) -> Parcel:
        """Copies the rows of k and v that others need, and the rank's own that it needs itself."""
        tensors = self.attention.k, self.attention.v
        axes = [axis_of(tensor, Role.KEY) for tensor in tensors]
        for_rank = [
            [
                heads_of(tensor, x, *self.plan.heads(r, number))
                for tensor, x in zip(tensors, (k, v), strict=True)
            ]
            for r in range(self.plan.ranks)
        ]
        mine = for_rank[self.rank]
        sizes_out = [
            [sized(x, axis, at.count) for x, axis in zip(some, axes, strict=True)]
            for some, at in zip(for_rank, self.keys.sent, strict=True)
        ]
        # Others send the heads that this rank computes, which are as many as its own.
        sizes_in = [
            [sized(x, axis, at.count) for x, axis in zip(mine, axes, strict=True)] for at in self.keys.kept
        ]
        counts_out, counts_in = (
            [sum(size.numel() for size in some) for some in sizes] for sizes in (sizes_out, sizes_in)
        )
        unit, _ = self._gathering(sizes_in, axes)
        own, counts_in[self.rank], counts_out[self.rank] = counts_in[self.rank], 0, 0
        sent = torch.empty(sum(counts_out), dtype=k.dtype, device=self.device)
        came = torch.empty(own + sum(counts_in) + unit, dtype=k.dtype, device=self.device)
        came[came.numel() - unit :].zero_()  # what holes of the window are made of: keys have to be finite
        places = {self.rank: came[:own]}
        others = [r for r in range(self.plan.ranks) if r != self.rank]
        places |= zip(others, torch.split(sent, [counts_out[r] for r in others]), strict=True)
        for r, place in places.items():
            pieces = torch.split(place, [size.numel() for size in sizes_out[r]])
            for x, axis, piece, size in zip(for_rank[r], axes, pieces, sizes_out[r], strict=True):
                self.keys.sent[r].copy(x, axis, piece.view(size))
        window = len(self._sources[0])
        shapes = sized(mine[0], axes[0], window), sized(mine[1], axes[1], window)
        return Parcel(sent, counts_out, came, counts_in, shapes)

    def exchange(self, parcel: Parcel) -> None:
        """Sends, and receives what others send."""
        if self.group.size > 1:
            first = parcel.came.numel() - self._unit - sum(parcel.counts_in)
            arriving = parcel.came.narrow(0, first, sum(parcel.counts_in))
            self.group.exchange(arriving, parcel.counts_in, parcel.sent, parcel.counts_out)

    def open_keys(self, parcel: Parcel) -> Pair:
        """The window of k and v that the waiting rows see, in the order of the keys."""
        assert self._index is not None
        unit, index = self._index
        rows = parcel.came.view(-1, unit).index_select(0, index).view(-1)
        k, v = torch.split(rows, [shape.numel() for shape in parcel.shapes])
        return k.view(parcel.shapes[0]), v.view(parcel.shapes[1])

    @property
    def _unit(self) -> int:
        assert self._index is not None
        return self._index[0]

    def _gathering(
        self, sizes: Sequence[Sequence[torch.Size]], axes: Sequence[int]
    ) -> tuple[int, torch.Tensor]:
        """How the windows are made of what came: pieces of so many elements, and which they are. It is the
        same for all parts of the heads.

        sizes: of the rows of k and v that each rank sends to this one.
        """
        if self._index is not None:
            return self._index
        inner = [size[axis + 1 :].numel() for size, axis in zip(sizes[self.rank], axes, strict=True)]
        unit = math.gcd(*inner)
        source, number = self._sources
        order = [self.rank, *(r for r in range(self.plan.ranks) if r != self.rank)]
        begins = np.zeros((self.plan.ranks, len(axes)), np.int64)
        end = 0
        for r in order:
            for i, size in enumerate(sizes[r]):
                begins[r, i], end = end, end + size.numel()
        found = []
        counts = np.asarray([at.count for at in self.keys.kept])
        for i, axis in enumerate(axes):
            lead = np.arange(sizes[self.rank][i][:axis].numel())[:, None]
            first = begins[source, i] + (lead * counts[source] + number) * inner[i]
            first = np.where(source < 0, end, first)[..., None] // unit
            within = np.arange(inner[i] // unit) * (source >= 0)[:, None]
            found.append((first + within).ravel())
        self._index = unit, torch.from_numpy(np.concatenate(found)).to(self.device)
        return self._index

    def return_keys(self, sums: Pair, totals: Pair, number: int, *, fresh: bool) -> None:
        """What this rank's rows add to dk and dv, to the owners of the keys, who add it to `totals`: what is
        their own, then rank by rank. Both are f32. fresh: there is nothing in them yet, and all is written.
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
            rows = [places.of(x, axis) for x, axis, places in sent[r]] if is_own else came[r]
            write = at.put if is_own and fresh else at.add
            for tensor, total, axis, some in zip(tensors, totals, axes, rows, strict=True):
                write(heads_of(tensor, total, *self.plan.heads(r, number)), axis, some)

    def fetch_queries(self, tensor: Tensor, x: torch.Tensor, number: int) -> torch.Tensor:
        """The rectangle's rows of q, do or dlse, for the heads of one part."""
        if self.plan.chosen.ways == 1:
            return heads_of(tensor, x, *self.heads(self.rank, number))
        axis = axis_of(tensor, Role.QUERY)
        sent = [
            [(heads_of(tensor, x, *self.heads(r, number)), axis, at)]
            for r, at in enumerate(self.queries.sent)
        ]
        mine = sent[self.rank][0]
        size = sized(mine[0], axis, len(self.plan.rows(self.rank)))
        made = torch.empty(size, dtype=x.dtype, device=self.device)
        came = self._swap(sent, [[(axis, at.count)] for at in self.queries.kept], [made])
        for r in self.plan.mates(self.rank):
            rows = mine[2].of(mine[0], axis) if r == self.rank else came[r][0]
            self.queries.kept[r].put(made, axis, rows)
        return made

    def return_queries(self, tensor: Tensor, made: torch.Tensor, x: torch.Tensor, number: int) -> None:
        """The rectangle's rows of o, lse or dq, back to their owners, into x."""
        axis = axis_of(tensor, Role.QUERY)
        sent = [[(made, axis, at)] for at in self.queries.kept]
        came = self._swap(sent, [[(axis, at.count)] for at in self.queries.sent], [made])
        for r in self.plan.mates(self.rank):
            rows = self.queries.kept[r].of(made, axis) if r == self.rank else came[r][0]
            heads_of(tensor, x, *self.heads(r, number)).copy_(rows)

    def heads(self, rank: int, number: int) -> tuple[int, int]:
        """Query heads that a rank computes in one part: first, and how many."""
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
            [] if r == self.rank else [sized(x, axis, at.count) for x, axis, at in rows]
            for r, rows in enumerate(sent)
        ]
        sizes_in = [
            [] if r == self.rank else [sized(x, *some) for x, some in zip(like, rows, strict=True)]
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
    """The axis with this role, which the tensor has."""
    return tensor.roles.index(role)


def heads_of(tensor: Tensor, x: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Some heads of a tensor."""
    return x.narrow(axis_of(tensor, Role.HEAD), first, count)


def sized(x: torch.Tensor, axis: int, count: int) -> torch.Size:
    """The shape with another number of rows."""
    return torch.Size([*x.shape[:axis], count, *x.shape[axis + 1 :]])
