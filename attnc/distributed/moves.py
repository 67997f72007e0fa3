"""What moves between ranks in a call, and back: rows of q, k and v to who computes with them, results home.

Tensors have any layout; rows are those of the axis that ranks share out. What a rank has for itself is copied
where it is and never sent. Which rows go where is said by index tensors on the device, made once from a
plan's numbers and used by every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeAlias

import numpy as np
import torch

from attnc.distributed.group import Ranks, SharedBytes
from attnc.distributed.plan import Plan
from attnc.distributed.spans import BLOCK, Ints
from attnc.model.attention import Attention
from attnc.model.tensors import Role, Tensor
from attnc.runtime.units import Recipe, collect

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


@dataclass(frozen=True, slots=True)
class KeyRoute:
    """Keys that move from their owners to the windows of the ranks that wait for them, as rows: sent[r] of
    what this rank owns go to rank r, kept[r] is where in its window its own arrive.
    """

    sent: tuple[Ints, ...]
    kept: tuple[Ints, ...]


def key_route(plan: Plan, rank: int) -> KeyRoute:
    mine, keys, ranks = plan.owned_keys(rank), plan.keys(rank), range(plan.ranks)
    first, kept = plan.window(rank)[0], plan.kept(rank)
    theirs = (np.intersect1d(plan.owned_keys(r), keys, assume_unique=True) for r in ranks)
    return KeyRoute(
        tuple(np.flatnonzero(np.isin(mine, plan.keys(r), assume_unique=True)) for r in ranks),
        tuple(x - first if kept is None else kept.searchsorted(x) for x in theirs),
    )


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


# --- tensors as units ---------------------------------------------------------------------------------------


class Piece:
    """A tensor whose rows along one axis move, in units that lie side by side. rows: how many; unit: elements
    of the longest; of_row: of a row.
    """

    def __init__(self, x: torch.Tensor, axis: int) -> None:
        self._shape, self._strides, self.axis = x.shape, x.stride(), axis
        self.unit = 1
        for size, stride in zip(
            reversed(self._shape[axis + 1 :]), reversed(self._strides[axis + 1 :]), strict=True
        ):
            if stride != self.unit and size > 1:
                break
            self.unit *= size
        self.rows = self._shape[axis]
        self._lead, self._inner = self._shape[:axis].numel(), self._shape[axis + 1 :].numel()
        self.of_row = self._lead * self._inner

    def shape(self, rows: int) -> torch.Size:
        return torch.Size([*self._shape[: self.axis], rows, *self._shape[self.axis + 1 :]])

    def units(self, rows: int, unit: int) -> tuple[int, int, int]:
        """Returns how `offsets` is shaped."""
        return self._lead, rows, self._inner // unit

    def offsets(self, rows: Ints, unit: int) -> Ints:
        """Returns where the units of these rows begin, [axes before, rows, units of the axes behind]."""
        lead, inner = (
            _offsets(self._shape[some], self._strides[some], step)
            for some, step in ((slice(self.axis), 1), (slice(self.axis + 1, None), unit))
        )
        return np.asarray(lead[:, None, None] + (rows * self._strides[self.axis])[:, None] + inner)

    def message(self, begin: int, rows: int, unit: int) -> Ints:
        """Returns where they begin in a message, from an element of it on."""
        return begin + np.arange(self.of_row // unit * rows).reshape(self.units(rows, unit)) * unit


def _offsets(shape: Sequence[int], strides: Sequence[int], step: int) -> Ints:
    """Returns the offset of every step-th element of a tensor."""
    found = np.zeros(1, np.int64)
    for count, stride in zip(shape, strides, strict=True):
        found = (found[:, None] + np.arange(count) * stride).ravel()
    return found[::step]


# --- what moves ---------------------------------------------------------------------------------------------


#: A tensor, the axis of its rows, and which of them are meant.
Rows: TypeAlias = tuple[torch.Tensor, int, RowPlaces]
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Keys on their way, for one part of the heads: the rows of k and v for each other rank, and room for
    theirs; a window, where the rank's own are in it already.
    """

    sent: torch.Tensor
    came: torch.Tensor
    window: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ParcelLayout:
    """How keys are packed, and windows made of a rank's own and those that came, whatever part of the heads
    they are of.

    counts_out, counts_in: elements to and from each rank; shapes: of the windows; placed, opened: what of
    them is the rank's own or nobody's, and what came; posts: elements from each rank to each other, where
    they are copied out of each other's memory.
    """

    counts_out: Sequence[int]
    counts_in: Sequence[int]
    shapes: tuple[torch.Size, torch.Size]
    packed: Recipe
    placed: Recipe
    opened: Recipe
    posts: Ints | None


@dataclass(frozen=True, slots=True)
class Early:
    """What rows that wait for nothing add to dk and dv of a run of the rank's keys, for all heads. at: the
    first of these keys.
    """

    dk: torch.Tensor
    dv: torch.Tensor
    at: int


@dataclass(frozen=True, slots=True)
class SumsLayout:
    """How gradients of keys go home: what of the windows' leaves, and what each owner adds up, of k and v:
    for keys that no other rank sees, and for the rest.
    """

    counts_out: Sequence[int]
    counts_in: Sequence[int]
    packed: Recipe
    own: tuple[Recipe, Recipe]
    shared: tuple[Recipe, Recipe]


def _wait_for_nothing() -> None:
    """Waits for nothing."""


class Moves:
    """The exchanges of one plan. Each is a collective: every rank calls it, whatever it has."""

    def __init__(self, plan: Plan, attention: Attention, group: Ranks, device: torch.device) -> None:
        self.plan, self.attention, self.group, self.device = plan, attention, group, device
        self.rank = group.rank
        self.others = [r for r in range(plan.ranks) if r != self.rank]
        self.keys = key_route(plan, self.rank)
        self.queries = query_route(plan, self.rank, device)
        self._keyed = tuple((tensor, axis_of(tensor, Role.KEY)) for tensor in (attention.k, attention.v))
        self._parcels: dict[object, ParcelLayout] = {}
        self._sums: dict[object, SumsLayout] = {}
        self._posts: Ints | None = None
        self._box: SharedBytes | None = None

    # --- keys

    def pack_keys(self, k: torch.Tensor, v: torch.Tensor, number: int) -> Parcel:
        layout = self._parcel_layout(k, v)
        size, came = sum(layout.counts_out), sum(layout.counts_in)
        if self._box is None:
            sent = torch.empty(size, dtype=k.dtype, device=self.device)
        else:
            sent = self._box.memory.view(k.dtype).narrow(0, number * size, size)
        collect(sent, layout.packed, *self._from_part(k, v, number))
        return Parcel(sent, torch.empty(came, dtype=k.dtype, device=self.device))

    def meet(self) -> None:
        """Waits for all ranks: before keys are copied out of others' memory they have to lie there, and until
        all have copied they stay.
        """
        if self._box is not None:
            self._box.meet()

    def exchange(self, parcel: Parcel, k: torch.Tensor, v: torch.Tensor, number: int) -> Callable[[], None]:
        """Begins to send and receive; returns what waits for it."""
        layout = self._parcel_layout(k, v)
        if self.group.size == 1:
            return _wait_for_nothing
        if layout.posts is None or self._box is None:
            return self.group.exchange(parcel.came, layout.counts_in, parcel.sent, layout.counts_out)
        for r, into in enumerate(torch.split(parcel.came, list(layout.counts_in))):
            first = number * int(layout.posts[r].sum()) + int(layout.posts[r, : self.rank].sum())
            if len(into):
                into.copy_(self._box.peers[r].view(into.dtype).narrow(0, first, len(into)))
        return _wait_for_nothing

    def place_own(self, k: torch.Tensor, v: torch.Tensor, number: int) -> torch.Tensor:
        """Returns memory of a window with the rank's own rows of k and v. Keys that nobody asked for are 0:
        they have to be finite.
        """
        layout = self._parcel_layout(k, v)
        size = sum(shape.numel() for shape in layout.shapes)
        window = torch.empty(size, dtype=k.dtype, device=self.device)
        return collect(window, layout.placed, *self._from_part(k, v, number))

    def open_keys(self, parcel: Parcel, k: torch.Tensor, v: torch.Tensor, number: int) -> Pair:
        """Returns the window of k and v that the waiting rows see, in the order of the keys."""
        layout = self._parcel_layout(k, v)
        of_k, of_v = layout.shapes
        keys = self.place_own(k, v, number) if parcel.window is None else parcel.window
        collect(keys, layout.opened, parcel.came)
        return keys[: of_k.numel()].view(of_k), keys[of_k.numel() :].view(of_v)

    def _from_part(self, k: torch.Tensor, v: torch.Tensor, number: int) -> Pair:
        """Returns k and v from the first head on that the first of the ranks which share heads computes in
        this part.
        """
        first = self.plan.heads(0, number)[0]
        return heads_from(self.attention.k, k, first), heads_from(self.attention.v, v, first)

    def _heads_behind(self, tensor: Tensor, x: torch.Tensor, rank: int) -> int:
        """Counts the elements from the heads of the first rank to those of another, in the same part."""
        behind = self.plan.heads(rank, 0)[0] - self.plan.heads(0, 0)[0]
        return behind * x.stride(axis_of(tensor, Role.HEAD))

    def _pieces(self, *tensors: torch.Tensor) -> list[Piece]:
        """Returns a rank's heads of tensors that are shaped like k and v, in one part."""
        count = self.plan.heads(self.rank, 0)[1]
        pair = zip(self._keyed, tensors, strict=True)
        return [Piece(heads_of(tensor, x, 0, count), axis) for (tensor, axis), x in pair]

    def _parcel_layout(self, k: torch.Tensor, v: torch.Tensor) -> ParcelLayout:
        key = k.dtype, k.stride(), v.stride()
        if key not in self._parcels:
            self._parcels[key] = self._make_parcel_layout(k, v)
        return self._parcels[key]

    def _make_parcel_layout(self, k: torch.Tensor, v: torch.Tensor) -> ParcelLayout:
        pieces, wide = self._pieces(k, v), k.element_size()
        unit = gcd(*(piece.unit for piece in pieces))
        counts_out, counts_in = self._counts(pieces, self.keys.sent), self._counts(pieces, self.keys.kept)

        def find_owned(which: int, rank: int) -> Ints:
            """Where the keys lie that are this rank's and go to another, or stay."""
            behind = self._heads_behind(self._keyed[which][0], (k, v)[which], rank)
            return pieces[which].offsets(self.keys.sent[rank], unit) + behind

        packed = [(which, find_owned(which, r)) for r in self.others for which in (0, 1)]
        windows: list[tuple[Ints, Ints]] = []
        shapes: list[torch.Size] = []
        came = 2
        begins, own = self._begins(pieces, self.keys.kept), self.keys.kept[self.rank]
        (first, stop), kept = self.plan.window(self.rank), self.plan.kept(self.rank)
        count = stop - first if kept is None else len(kept)
        for which, piece in enumerate(pieces):
            shapes.append(piece.shape(count))
            offsets = np.full(piece.units(count, unit), -1)
            source = np.zeros(offsets.shape, np.int64)
            offsets[:, own], source[:, own] = find_owned(which, self.rank), which
            for r in self.others:
                rows = self.keys.kept[r]
                source[:, rows] = came
                offsets[:, rows] = piece.message(begins[r][which], len(rows), unit)
            windows.append((source.ravel(), offsets.ravel()))
        source, offsets = (np.concatenate(parts) for parts in zip(*windows, strict=True))
        into, late = np.arange(len(offsets)) * unit, source == came
        mine = [(source[~late], offsets[~late])]
        return ParcelLayout(
            counts_out,
            counts_in,
            (shapes[0], shapes[1]),
            Recipe.of(unit, [packed], wide, self.device),
            Recipe.of(unit, [mine], wide, self.device, into[~late]),
            Recipe.of(unit, [[(0, offsets[late])]], wide, self.device, into[late]),
            self._post(counts_out, wide),
        )

    def _counts(self, pieces: Sequence[Piece], rows: Sequence[Ints]) -> list[int]:
        of_row = sum(piece.of_row for piece in pieces)
        return [0 if r == self.rank else len(some) * of_row for r, some in enumerate(rows)]

    def _begins(self, pieces: Sequence[Piece], rows: Sequence[Ints]) -> list[list[int]]:
        """Returns where what comes from each other rank begins in a message: of k, and of v."""
        found, at = [], 0
        for r, some in enumerate(rows):
            found.append([at, at])
            for which, piece in enumerate(pieces):
                found[r][which] = at
                at += 0 if r == self.rank else len(some) * piece.of_row
        return found

    def _post(self, counts: Sequence[int], wide: int) -> Ints | None:
        """Returns `ParcelLayout.posts`, and makes a box that has room for all parts of the heads."""
        if not self.group.symmetric:
            return None
        if self._posts is None:
            self._posts = self.group.gather(torch.tensor(counts, device=self.device)).cpu().numpy()
            most = int(self._posts.sum(axis=1).max()) * self.plan.chosen.groups * wide
            self._box = self.group.outbox(-(-max(most, 1) // BLOCK) * BLOCK)
        return self._posts

    # --- gradients of keys

    def return_keys(self, sums: Sequence[Pair], totals: Pair, number: int, early: Early | None) -> None:
        """Sends this rank's summands of dk and dv, which are f32, to the owners of the keys. They write the
        sums into `totals`, for the heads of one part: of `early`, of what is their own, then rank by rank.
        sums: of the keys of a window, one piece of it after the other.
        """
        layout, like = self._sums_layout(sums, totals, early), sums[0][0]
        both = (x for pair in sums for x in pair)
        sent = collect(like.new_empty(sum(layout.counts_out)), layout.packed, *both)
        came, wait = like.new_empty(sum(layout.counts_in)), _wait_for_nothing
        if self.group.size > 1:
            wait = self.group.exchange(came, layout.counts_in, sent, layout.counts_out)
        totals = self._from_part(*totals, number)
        begun = [] if early is None else [self._from_part(early.dk, early.dv, number)]

        def add(recipes: tuple[Recipe, Recipe]) -> None:
            for which, (total, recipe) in enumerate(zip(totals, recipes, strict=True)):
                mine, first = ([pair[which] for pair in pairs] for pairs in (sums, begun))
                collect(total, recipe, came, *mine, *first)

        add(layout.own)
        wait()
        add(layout.shared)

    def _sums_layout(self, sums: Sequence[Pair], totals: Pair, early: Early | None) -> SumsLayout:
        key = tuple(x.stride() for x in totals)
        if key not in self._sums:
            self._sums[key] = self._make_sums_layout(sums, totals, early)
        return self._sums[key]

    def _make_sums_layout(self, sums: Sequence[Pair], totals: Pair, early: Early | None) -> SumsLayout:
        owned, windows = self._pieces(*totals), [self._pieces(*pair) for pair in sums]
        begun = self._pieces(early.dk, early.dv) if early is not None else []
        every = (*owned, *begun, *(piece for pieces in windows for piece in pieces))
        unit, wide = gcd(*(piece.unit for piece in every)), sums[0][0].element_size()
        k_and_v = tuple(zip(*windows, strict=True))  # the pieces of dk, and of dv

        def in_window(which: int, rows: Ints) -> tuple[Ints, Ints]:
            """Says in which piece of the window rows lie, and where their units begin there."""
            piece, offsets = np.zeros((2, *k_and_v[which][0].units(len(rows), unit)), np.int64)
            first = 0
            for number, of in enumerate(k_and_v[which]):
                here = (rows >= first) & (rows < first + of.rows)
                piece[:, here], offsets[:, here] = number, of.offsets(rows[here] - first, unit)
                first += of.rows
            return piece, offsets

        gone = [(which, *in_window(which, self.keys.kept[r])) for r in self.others for which in (0, 1)]
        leaving = [(2 * piece + which, offsets) for which, piece, offsets in gone]
        begins, own, shared = self._begins(windows[0], self.keys.sent), list[Recipe](), list[Recipe]()
        keys, ways = np.arange(len(self.plan.owned_keys(self.rank))), self.plan.chosen.ways
        for which, ((tensor, _), total) in enumerate(zip(self._keyed, totals, strict=True)):
            window = windows[0][which]
            behind = [self._heads_behind(tensor, total, share) for share in range(ways)]
            into = np.stack([owned[which].offsets(keys, unit) + x for x in behind])
            terms: list[tuple[Ints, Ints]] = []
            if early is not None:  # then no heads are shared
                rows = np.arange((early.dk, early.dv)[which].shape[begun[which].axis])
                offsets = np.full(into.shape, -1)
                offsets[0][:, early.at + rows] = begun[which].offsets(rows, unit)
                terms.append((np.full(into.shape, 1 + len(sums)), offsets))
            late = np.zeros(into.shape, np.bool_)
            for r in (self.rank, *self.others):
                # Nothing comes of heads that rank r does not compute, and of keys that it does not see.
                offsets, rows = np.full(into.shape, -1), self.keys.sent[r]
                source = np.zeros(into.shape, np.int64)  # what came
                if r == self.rank:
                    piece, at = in_window(which, self.keys.kept[r])
                    source[r % ways][:, rows], offsets[r % ways][:, rows] = 1 + piece, at
                else:
                    offsets[r % ways][:, rows] = window.message(begins[r][which], len(rows), unit)
                    late |= offsets >= 0
                terms.append((source, offsets))
            for found, some in ((own, ~late), (shared, late)):
                some_terms = [[(source[some], offsets[some])] for source, offsets in terms]
                some_terms = some_terms[: len(terms) - len(self.others)] if found is own else some_terms
                found.append(Recipe.of(unit, some_terms, wide, self.device, into[some]))
        return SumsLayout(
            self._counts(windows[0], self.keys.kept),
            self._counts(windows[0], self.keys.sent),
            Recipe.of(unit, [leaving], wide, self.device),
            (own[0], own[1]),
            (shared[0], shared[1]),
        )

    # --- queries

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
            self.group.exchange(arriving, counts_in, sending, counts_out)()
        came = iter(torch.split(arriving, [size.numel() for some in sizes_in for size in some]))
        return [[next(came).view(size) for size in some] for some in sizes_in]


def axis_of(tensor: Tensor, role: Role) -> int:
    """Returns the axis with this role, which the tensor has."""
    return tensor.roles.index(role)


def heads_from(tensor: Tensor, x: torch.Tensor, first: int) -> torch.Tensor:
    """Returns the heads of a tensor from one on."""
    axis = axis_of(tensor, Role.HEAD)
    return x.narrow(axis, first, x.shape[axis] - first)


def heads_of(tensor: Tensor, x: torch.Tensor, first: int, count: int) -> torch.Tensor:
    return x.narrow(axis_of(tensor, Role.HEAD), first, count)


def with_rows(x: torch.Tensor, axis: int, count: int) -> torch.Size:
    """Replaces the number of rows in a shape."""
    return torch.Size([*x.shape[:axis], count, *x.shape[axis + 1 :]])
