"""One plan on one rank: tables and routes made once, and the calls that follow them, forward and backward.

    exchanges    part 0  part 1  part 2 ...
    ready rows   --- kernel ---
    part 0               --- kernel --- (-> exchange of results)
    part 1                              --- kernel --- ...

A part has some of the heads. What a rank computes of a row is complete, so no results meet but gradients of
keys: these leave as f32 and are added in the order of the ranks, the same bits in every run.
Exchanges run on a stream beside the kernels (`Lanes`). Inputs are seen as a rank's rows, keys and heads see
them, by tables of positions that derived specs read (`derive.TABLES`); their gradients go back to the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeAlias

import torch

from attnc.distributed.derive import View
from attnc.distributed.group import Ranks
from attnc.distributed.kernels import RankKernels
from attnc.distributed.moves import Early, Moves, Pair, RowPlaces, axis_of, heads_of, places
from attnc.distributed.plan import Plan, RowGroup
from attnc.distributed.views import add_view, tables_of, view_of
from attnc.model.tensors import Role, Tensor
from attnc.support.arguments import DTYPES

# --- streams ------------------------------------------------------------------------------------------------


class Lanes:
    """The caller's stream, one for exchanges, and a second one for kernels, so that one begins while the last
    blocks of another still run. On a CPU there is one order of things, and where nothing overlaps, too: all
    this is nothing then, and costs the host no time.
    """

    def __init__(self, device: torch.device, *, overlap: bool = True) -> None:
        self.device = device
        self._main: torch.cuda.Stream | None = None
        if device.type == "cuda" and overlap:
            self._main = torch.cuda.current_stream(device)
            self._side, self._second = _streams(device)
            for stream in (self._side, self._second):
                stream.wait_stream(self._main)

    @contextmanager
    def exchanging(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Runs the calls of the block concurrently with the kernels, in order with other exchanges."""
        if self._main is None:
            yield
            return
        for x in tensors:
            x.record_stream(self._side)
        with torch.cuda.stream(self._side):
            yield

    @contextmanager
    def kernel(self, number: int, *tensors: torch.Tensor) -> Iterator[None]:
        """Runs what is called within, which reads tensors of others, on one of two streams for kernels."""
        if self._main is None:
            yield
            return
        stream = self._second if number % 2 else self._main
        for x in tensors:
            x.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.device).record_event() if self._main is not None else None

    def after(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def join(self) -> None:
        if self._main is not None:
            for stream in (self._side, self._second):
                self._main.wait_stream(stream)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return _stream(device, -1), _stream(device, 0)


def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]  # torch is not typed


# --- the stages ---------------------------------------------------------------------------------------------


Tensors: TypeAlias = tuple[torch.Tensor, ...]
Extras: TypeAlias = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """A part of the plan: its rows, the tables that the kernel takes, and the `stops` of `view_of`; of inputs
    that the plan depends on, the views that were made last.
    """

    part: RowGroup
    queries: RowPlaces
    tables: Mapping[str, torch.Tensor]
    stops: Mapping[str, int]
    views: dict[object, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class Gradients:
    """dq, dk and dv in the types of q, k and v; those of other inputs, whole, in f32."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    extras: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Coming:
    """What a part of the heads is computed with: rows of q and others, the event behind which all of it is
    there, the memory that keys come in, and how to open it as a window.
    """

    fetched: Tensors
    event: torch.cuda.Event | None
    memory: Tensors
    open_keys: Callable[[], Pair]


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _keep_window(window: Pair) -> Pair:
    return window


#: Bytes of a rank's window that are kept for its gradients unless told otherwise, in those of its q, k, v and
#: o.
KEPT = 1 / 3


class Stages:
    """What a rank does under a plan. keeps: whether the windows of a forward are kept for its gradients;
    None: where they are small beside q, k, v and o, which are.
    """

    def __init__(
        self,
        plan: Plan,
        kernels: RankKernels,
        group: Ranks,
        device: torch.device,
        keeps: bool | None = None,
    ) -> None:
        self.plan, self.kernels, self.device = plan, kernels, device
        self.rank = group.rank
        self.attention = attention = kernels.attention
        self.keeps = plan.kept_share <= KEPT if keeps is None else keeps
        self.moves = Moves(plan, attention, group, device)
        tasks = [self._task(part) for part in plan.parts(self.rank)]
        self.ready = next((task for task in tasks if task.part.ready), None)
        self.waiting = [task for task in tasks if not task.part.ready]
        own = plan.owned_keys(self.rank)
        run = self.ready.part if self.ready is not None else None
        #: Where the run of keys begins that ready rows see, among the rank's own.
        self._run_at = int(own.searchsorted(run.lo)) if run is not None and len(own) else 0
        self.lse = attention.lse or replace(
            attention.o, name="lse", roles=attention.o.roles[:-1], shape=attention.o.shape[:-1]
        )
        self._packed = plan.sizes.ends_q is not None
        #: Whether what waits is all that this rank computes, in one part: its dq is the rank's.
        self._is_all = plan.chosen.ways == plan.chosen.groups == 1 and [
            task.queries.count for task in self.waiting
        ] == [len(plan.rows(self.rank))]
        #: Whether anything is done while something else is.
        self._overlaps = self.ready is not None or plan.chosen.groups > 1 or group.symmetric
        #: What waits begins while the last blocks of what does not still run.
        self._shift = int(self.ready is not None)
        #: Whether all rows are computed: those past the last packed sequence are not.
        self._is_whole = not len(rows := plan.rows(self.rank)) or int(rows[-1]) < plan.last_row

    def _task(self, part: RowGroup) -> Task:
        rows = self.plan.rows(self.rank)[part.rows]
        tables = tables_of(self.plan, self.attention, rows, part.lo, self.device, part.kept)
        stops = {
            kind: int(table.max()) + 1
            for kind in ("rows", "places", "keys")
            if (table := tables.get(f"_{kind}")) is not None and len(table) and int(table.min()) >= 0
        }
        return Task(part, places(part.rows, self.device), tables, stops)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras
    ) -> tuple[Pair, list[Pair], list[Pair]]:
        """Returns (o, lse) of the rank's rows; where ranks share heads, of each part of its rectangle, which
        its gradients start from; and the windows of k and v of each part, where they are kept for them.
        """
        plan, attention, shares = self.plan, self.attention, self.plan.chosen.ways > 1
        results = self._results(len(plan.owned_rows(self.rank)), plan.sizes.heads)
        rectangles: list[Pair] = []
        windows: list[Pair] = []
        lanes = Lanes(self.device, overlap=self._overlaps)
        coming = self._coming(lanes, k, v, lambda n: (self.moves.fetch_queries(attention.q, q, n),))
        if self.ready is not None:
            keys = self._run(k), self._run_of_v(v)
            self._compute(self.ready, q, keys, extras, 0, results)
        for number, part in enumerate(coming):
            (q_part,), (first, heads) = part.fetched, self.moves.heads(self.rank, number)
            if shares:
                into = self._results(len(plan.rows(self.rank)), heads)
                rectangles.append(into)
            else:
                into = self._heads(results, first, heads)
            with lanes.kernel(number + self._shift, q_part, *part.memory, *into):
                lanes.after(part.event)
                if self.waiting or self.keeps:
                    window = part.open_keys()
                    windows += [window] * self.keeps
                    for task in self.waiting:
                        self._compute(task, q_part, self._keys_of(task, window), extras, first, into)
                done = lanes.mark()
            if shares:
                with lanes.exchanging(*into):
                    lanes.after(done)
                    self.moves.return_queries(attention.o, into[0], results[0], number)
                    self.moves.return_queries(self.lse, into[1], results[1], number)
        lanes.join()
        return results, rectangles, windows

    def backward(
        self,
        cotangents: tuple[torch.Tensor, torch.Tensor | None],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extras: Extras,
        results: Pair,
        rectangles: list[Pair],
        windows: list[Pair],
    ) -> Gradients:
        """Returns the gradients, from those of o and lse (None: 0) and what the forward took and gave."""
        shares = self.plan.chosen.ways > 1
        (do, dlse), lanes = cotangents, Lanes(self.device, overlap=self._overlaps)
        made = Gradients(
            torch.empty_like(q) if self._is_whole else torch.zeros_like(q),
            torch.empty_like(k),
            torch.empty_like(v),
            {
                view.tensor: torch.zeros(extras[view.tensor].shape, dtype=torch.float32, device=self.device)
                for view in self.kernels.derived.grads
            },
        )

        def fetch(number: int) -> Tensors:
            q_part = self.moves.fetch_queries(self.attention.q, q, number)
            do_part = self.moves.fetch_queries(self.attention.o, do, number)
            dlse_part = [] if dlse is None else [self.moves.fetch_queries(self.lse, dlse, number)]
            return (q_part, do_part, *dlse_part)

        coming = self._coming(lanes, k, v, fetch, windows)
        early, added = None, None
        if self.ready is not None:
            keys = self._run(k), self._run_of_v(v)
            dq, sums = self._differentiate(self.ready, (do, dlse), q, keys, extras, 0, results, made)
            self.ready.queries.put(made.dq, axis_of(self.attention.q, Role.QUERY), dq)
            early, added = Early(*sums, self._run_at), lanes.mark()
        for number, part in enumerate(coming):
            (q_part, do_part, *rest), (first, heads) = part.fetched, self.moves.heads(self.rank, number)
            into = rectangles[number] if shares else self._heads(results, first, heads)
            lane = 0 if made.extras else number + self._shift
            with lanes.kernel(lane, q_part, *part.memory, do_part, *rest):
                lanes.after(part.event)
                window = part.open_keys()
                dq = torch.zeros_like(q_part) if shares else heads_of(self.attention.q, made.dq, first, heads)
                given, found = (do_part, (rest[0] if rest else None)), list[Pair]()
                for task in self.waiting:
                    keys = self._keys_of(task, window)
                    own, sums = self._differentiate(task, given, q_part, keys, extras, first, into, made)
                    found.append(sums)
                    if self._is_all:
                        made.dq = own
                    else:
                        task.queries.put(dq, axis_of(self.attention.q, Role.QUERY), own)
                found = found or [(nothing_for(window[0]), nothing_for(window[1]))]
                done = lanes.mark()
            before = [] if early is None else [(early.dk, early.dv)]
            with lanes.exchanging(dq, made.dk, made.dv, *(x for sums in (*found, *before) for x in sums)):
                lanes.after(done)
                lanes.after(added)
                self.moves.return_keys(found, (made.dk, made.dv), number, early)
                if shares:
                    self.moves.return_queries(self.attention.q, dq, made.dq, number)
        lanes.join()
        return made

    # --- one task -----------------------------------------------------------------------------------------

    def _compute(
        self, task: Task, q: torch.Tensor, keys: Pair, extras: Extras, first: int, into: Pair
    ) -> None:
        own, tensors = task.queries, (self.attention.o, self.lse)
        axes = [axis_of(tensor, Role.QUERY) for tensor in tensors]
        arguments = self._arguments(task, q, keys, extras, first)
        if own.index is None:
            out = tuple(self._add_batch_axis(own.take(x, axis)) for x, axis in zip(into, axes, strict=True))
            self.kernels.forward(*arguments, out=out)
            return
        made = self.kernels.forward(*arguments)
        for x, part, axis in zip(into, made, axes, strict=True):
            own.put(x, axis, self._drop_batch_axis(part))

    def _differentiate(
        self,
        task: Task,
        cotangents: tuple[torch.Tensor, torch.Tensor | None],
        q: torch.Tensor,
        keys: Pair,
        extras: Extras,
        first: int,
        results: Pair,
        made: Gradients,
    ) -> tuple[torch.Tensor, Pair]:
        """Returns dq of the task's rows, and what they add to dk and dv of its keys; what belongs to other
        inputs is added to `made`.
        """
        own = task.queries
        o, lse = (
            self._add_batch_axis(own.take(x, axis_of(tensor, Role.QUERY)))
            for tensor, x in zip((self.attention.o, self.lse), results, strict=True)
        )
        do = self._add_batch_axis(own.take(cotangents[0], axis_of(self.attention.o, Role.QUERY)))
        dlse = cotangents[1]
        if dlse is not None:
            dlse = self._add_batch_axis(own.take(dlse, axis_of(self.lse, Role.QUERY)))
        arguments = self._arguments(task, q, keys, extras, first)
        dq, dk, dv, *others = self.kernels.gradients(do, dlse, arguments, o, lse)
        for view, gradient in zip(self.kernels.derived.grads, others, strict=True):
            add_view(view, task.part, task.tables, made.extras[view.tensor], gradient, first)
        sums = self._drop_batch_axis(dk).contiguous(), self._drop_batch_axis(dv).contiguous()
        return self._drop_batch_axis(dq), sums

    def _arguments(self, task: Task, q: torch.Tensor, keys: Pair, extras: Extras, first: int) -> Tensors:
        axis = axis_of(self.attention.q, Role.QUERY)
        heads = q.shape[axis_of(self.attention.q, Role.HEAD)]
        inputs: list[torch.Tensor] = []
        for item in self.kernels.derived.inputs:
            if isinstance(item, View):
                inputs.append(self._view(task, item, extras[item.tensor], first, heads))
            elif item == "head_first":
                inputs.append(torch.full((), first, dtype=torch.int32, device=self.device))
            else:
                inputs.append(task.tables[item])
        return (self._add_batch_axis(task.queries.take(q, axis)), *map(self._add_batch_axis, keys), *inputs)

    def _view(self, task: Task, view: View, x: torch.Tensor, first: int, heads: int) -> torch.Tensor:
        """Returns the part of an input that the task takes. It is the same object as before if the plan
        depends on it, as on numbers of documents, and it has not been written to since.
        """
        if view.tensor not in self.kernels.visibility.reads or x.is_inference() or _is_captured(self.device):
            return view_of(view, task.part, task.tables, x, first, heads, task.stops)
        key = view.name, first, heads, _stream_of(self.device)
        known = task.views.get(key)
        if known is not None and known[0]() is x and known[1] == x._version:
            return known[2]
        made = view_of(view, task.part, task.tables, x, first, heads, task.stops)
        task.views[key] = weakref.ref(x), x._version, made
        return made

    # --- pieces -------------------------------------------------------------------------------------------

    def _keys_of(self, task: Task, window: Pair) -> Pair:
        """Returns the keys of a window that a task's rows are computed against."""
        first, count, (k, v) = task.part.at, len(task.part.keys), window
        return (
            k.narrow(axis_of(self.attention.k, Role.KEY), first, count),
            v.narrow(axis_of(self.attention.v, Role.KEY), first, count),
        )

    def _coming(
        self,
        lanes: Lanes,
        k: torch.Tensor,
        v: torch.Tensor,
        fetch: Callable[[int], Tensors],
        windows: Sequence[Pair] = (),
    ) -> list[Coming]:
        """Returns the exchanges for each part of the heads: keys, unless their windows are there, and other
        tensors. All exchanges are asked for before the first kernel, and none waits for anything that comes
        after a kernel: a kernel that fills the GPU lets no other in before its last blocks.
        """
        moves, count = self.moves, self.plan.chosen.groups
        if windows:
            with lanes.exchanging():
                fetched = [(fetch(number), lanes.mark()) for number in range(count)]
            return [Coming(*of, x, partial(_keep_window, x)) for of, x in zip(fetched, windows, strict=True)]

        def coming(number: int) -> Coming:
            parcel = parcels[number]
            wait = moves.exchange(parcel, k, v, number)
            if count == 1:  # while the others' are on their way
                parcel = replace(parcel, window=moves.place_own(k, v, number))
            fetched = fetch(number)
            wait()
            memory = (parcel.came,) if parcel.window is None else (parcel.came, parcel.window)
            keys = partial(moves.open_keys, parcel, k, v, number)
            return Coming(fetched, lanes.mark(), memory, keys)

        with lanes.exchanging():
            parcels = [moves.pack_keys(k, v, 0)]
            packed = lanes.mark()
            moves.meet()
            found = [coming(0)]
        if count > 1:
            with lanes.kernel(1):
                parcels += [moves.pack_keys(k, v, number) for number in range(1, count)]
                others_packed = lanes.mark()
            with lanes.exchanging(*(x for parcel in parcels[1:] for x in (parcel.sent, parcel.came))):
                lanes.after(others_packed)
                moves.meet()
                found += map(coming, range(1, count))
        with lanes.exchanging():
            moves.meet()
        if self.ready is not None:
            lanes.after(packed)  # else its kernel fills the GPU before the exchange has begun
        return found

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return self._run_of(self.attention.k, x)

    def _run_of_v(self, x: torch.Tensor) -> torch.Tensor:
        return self._run_of(self.attention.v, x)

    def _run_of(self, tensor: Tensor, x: torch.Tensor) -> torch.Tensor:
        assert self.ready is not None
        part = self.ready.part
        return x.narrow(axis_of(tensor, Role.KEY), self._run_at, part.hi - part.lo)

    def _results(self, rows: int, heads: int) -> Pair:
        sizes = {
            Role.BATCH: self.plan.sizes.batch,
            Role.QUERY: rows,
            Role.HEAD: heads,
            Role.FEATURE: self.plan.widths.dv,
        }
        o, lse = self.attention.o, self.lse
        made = (
            torch.empty([sizes[role] for role in o.roles], dtype=DTYPES[o.dtype], device=self.device),
            torch.empty([sizes[role] for role in lse.roles], dtype=torch.float32, device=self.device),
        )
        if not self._is_whole:
            made[0].zero_()
            made[1].fill_(float("-inf"))
        return made

    def _heads(self, results: Pair, first: int, heads: int) -> Pair:
        return (
            heads_of(self.attention.o, results[0], first, heads),
            heads_of(self.lse, results[1], first, heads),
        )

    def _add_batch_axis(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0) if self._packed else x

    def _drop_batch_axis(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(0) if self._packed else x


def nothing_for(x: torch.Tensor) -> torch.Tensor:
    """Returns a gradient of x to which no row added."""
    return torch.zeros_like(x, dtype=torch.float32)
