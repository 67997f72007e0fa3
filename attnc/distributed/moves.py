"""What moves between ranks in a call, and back: rows of q, k and v to who computes with them, results home.

Tensors have any layout; rows are those of the axis that ranks share out. What a rank has for itself is copied
where it is and never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from attnc.distributed.group import Ranks
from attnc.distributed.plan import Plan
from attnc.distributed.rows import Places, holes, key_route, query_route
from attnc.model.attention import Attention
from attnc.model.tensors import Role, Tensor

#: A tensor, the axis of its rows, and which of them are meant.
Rows: TypeAlias = tuple[torch.Tensor, int, Places]
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Moves:
    """The exchanges of one plan. Each is a collective: every rank calls it, whatever it has."""

    def __init__(self, plan: Plan, attention: Attention, group: Ranks, device: torch.device) -> None:
        self.plan, self.attention, self.group, self.device = plan, attention, group, device
        self.rank = group.rank
        self.keys = key_route(plan, self.rank, device)
        self.queries = query_route(plan, self.rank, device)
        self.holes = holes(plan, self.rank, device)
        lo, hi = plan.window(self.rank)
        self.window = hi - lo

    def fetch_keys(self, k: torch.Tensor, v: torch.Tensor, number: int) -> Pair:
        """The window of k and v that the waiting rows see, for the heads of one part."""
        tensors = self.attention.k, self.attention.v
        axes = [axis_of(tensor, Role.KEY) for tensor in tensors]
        sent = [
            [
                (heads_of(tensor, x, *self.plan.heads(r, number)), axis, at)
                for tensor, x, axis in zip(tensors, (k, v), axes, strict=True)
            ]
            for r, at in enumerate(self.keys.sent)
        ]
        mine = sent[self.rank]
        sizes = [sized(x, axis, self.window) for x, axis, _ in mine]
        window = [torch.empty(size, dtype=k.dtype, device=self.device) for size in sizes]
        came = self._swap(sent, [[(axis, at.count) for axis in axes] for at in self.keys.kept], window)
        for x, axis in zip(window, axes, strict=True):
            self.holes.clear(x, axis)  # keys that nobody asked for must be finite
        for r, at in enumerate(self.keys.kept):
            own = [rows.of(x, axis) for x, axis, rows in mine] if r == self.rank else came[r]
            for x, axis, rows in zip(window, axes, own, strict=True):
                at.put(x, axis, rows)
        return window[0], window[1]

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
