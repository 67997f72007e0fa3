"""What each role of a Hopper forward kernel does: which integers the scheduler publishes and when it claims
a tile, which keys each consumer walks over, what of a score is computed once for a key or a row.

All of it follows from the planned kernel. Templates print it, and decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from attnc.expr.nodes import (
    TRUE,
    Binary,
    Call,
    Compare,
    Dim,
    Expr,
    Index,
    Load,
    Or,
    Ref,
    Search,
    walk,
)
from attnc.expr.simplify import substitute
from attnc.model.attention import Variant
from attnc.model.dtypes import DType
from attnc.plan.access import LastSection
from attnc.plan.ir import Fetch, Forward, Let, Statement, statement_expressions
from attnc.plan.ir.kernel import expressions_within
from attnc.plan.layout import Roles
from attnc.plan.regions import guard_of, partial_test
from attnc.plan.sm90.finishing import Finishing, plan_finishing
from attnc.plan.sm90.hoisting import (
    Ends,
    HoistedScore,
    exponent,
    in_columns,
    product_exponent,
    row_ends,
    shared_score,
)
from attnc.plan.sm90.layout import WGMMA_ROWS, Sm90Layout, WayOut
from attnc.plan.sm90.scores import Column, is_pair
from attnc.plan.sm90.softcap import Cap, cap_of
from attnc.plan.steps import fetches_for, is_short_integer, names_in, names_of, needed_for

#: Tiles for each block that the last heads have, which are walked through together, where tiles are claimed
#: late (measured on an H200).
LAST_ROUNDS = 2
#: Key tiles that are left to be copied when the next tile is claimed; more where its bounds are searched for
#: (measured on an H200).
CLAIMED_AHEAD, SEARCHED_AHEAD = 1, 6
#: The name of the key before which every row sees all, where partial tiles end the range.
ALL_SEE = "all_see_hi"
_TILE = Dim("BLOCK_N")
#: Integers that are held in 4 bytes.
_SHORT = (DType.I32, DType.BOOL, DType.U8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """When a block takes its next tile from the counter. late: while the last `ahead` key tiles of the tile
    before are copied, so that it goes to the block that is free first; else as soon as a work tile is free.
    last_rounds: tiles for each block that the last heads have, which are walked through together.
    """

    late: bool
    ahead: int
    last_rounds: int

    @property
    def last(self) -> LastSection:
        return LastSection(rounds=self.last_rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTile:
    """The integers that the scheduler publishes of a tile. own: those of them with a value for each consumer;
    sizes: sizes of the call that it replaces by those of a sequence; all_see: the key before which every row
    sees all, None where partial tiles do not end the range; seen: where a range begins and ends whose keys
    every row sees, None where one end alone may be partial; readers: warps that read it besides the
    consumers. scheduled, consumed: what the scheduler, and consumers, compute of a tile; produced: what
    producers do; walked: what tests of key tiles load.
    """

    published: tuple[str, ...]
    own: tuple[str, ...]
    sizes: tuple[str, ...]
    all_see: Expr | None
    seen: tuple[Expr, Expr] | None
    readers: int
    scheduled: tuple[Statement, ...]
    consumed: tuple[Statement, ...]
    produced: tuple[Statement, ...]
    walked: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRoles:
    """Of scores, what is not computed element by element. score: without its common parts, None: the product
    alone; exponent: what p is 2 to the power of, None: a multiplication; near: the same by a polynomial,
    where `cap`, a capped product, is small; ends: of an interval of keys that a row sees, None for another
    mask; vectors: what comes through shared memory with 4 bytes a key; loaded: those of them that are loads;
    pair: what comes there for each query and key; of_keys: what is computed of each key.
    """

    score: HoistedScore | None
    exponent: Expr | None
    near: Expr | None
    cap: Cap | None
    ends: Ends | None
    vectors: tuple[Fetch | Let, ...]
    loaded: tuple[Fetch, ...]
    pair: Fetch | None
    of_keys: tuple[Statement, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        return () if self.score is None else self.score.columns

    @property
    def loads_keys(self) -> bool:
        return bool(self.vectors) or any(column.of_key is not None for column in self.columns)

    @property
    def is_loaded(self) -> bool:
        """Whether something comes through shared memory, whose places are given back once it is read."""
        return bool(self.vectors or self.pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90Roles(Roles):
    """The roles of one kernel. own_ranges: each consumer walks over the key tiles that its own rows see, and
    a share of the scheduler's lanes searches for the bounds of each; searches_together: all its lanes search
    for what is searched; clears_values: rows of v in a partial tile are made zero;
    partial_tiles_end_the_range: they are the last ones; lazy_may_be_partial: tiles without a maximum of their
    own may be partial; values_come_late: v is waited for where it is multiplied, and not before: what comes
    of pairs holds it up, or it comes where the one before it is given back. boxes: tensors that TMA copies;
    boxes_alone: those of them that nothing else reads; finishing: how the rows that the epilogue loads come,
    None for no rows; ways_out: how its configs store o.
    """

    claims: Claims
    work: WorkTile
    softmax: ScoreRoles
    own_ranges: bool
    searches_together: bool
    clears_values: bool
    partial_tiles_end_the_range: bool
    lazy_may_be_partial: bool
    values_come_late: bool
    boxes: tuple[str, ...]
    boxes_alone: tuple[str, ...]
    finishing: Finishing | None
    ways_out: tuple[WayOut, ...]


def plan_roles(kernel: Forward, layout: Sm90Layout, variant: Variant) -> Sm90Roles:
    """Returns the roles of a kernel that is planned but for them."""
    tensors = (*variant.attention.inputs, *variant.attention.outputs)
    return _RolePlanner(
        kernel, layout, variant, {tensor.name: DType(tensor.dtype) for tensor in tensors}
    ).plan()


@dataclass(frozen=True, slots=True)
class _RolePlanner:
    kernel: Forward
    layout: Sm90Layout
    variant: Variant
    dtypes: Mapping[str, DType]

    def plan(self) -> Sm90Roles:
        kernel = self.kernel
        softmax = self._plan_softmax()
        self._verify_room(softmax)
        own_ranges = self._has_own_ranges(softmax)
        late = kernel.grid.longest_first and kernel.grid.sequences is None
        finishing = plan_finishing(kernel, self.layout, self.dtypes)
        copied = _loads_of_boxes(softmax, finishing)
        boxes, end = self._list_boxes(copied), partial_tiles_end_the_range(kernel)
        return Sm90Roles(
            claims=Claims(
                late=late,
                ahead=SEARCHED_AHEAD if self._searches() else CLAIMED_AHEAD,
                last_rounds=LAST_ROUNDS if late else 0,
            ),
            work=self._plan_work(softmax, own_ranges=own_ranges),
            softmax=softmax,
            own_ranges=own_ranges,
            searches_together=self._searches() and not self._searches_in_tiles(),
            clears_values=self._clears_values,
            partial_tiles_end_the_range=end,
            lazy_may_be_partial=kernel.softmax.headroom > 0
            and partial_test(kernel.regions) != TRUE
            and not end,
            values_come_late=self._has_one_stage() or (softmax.pair is not None and not self._clears_values),
            boxes=boxes,
            boxes_alone=tuple(name for name in boxes if not self._is_read_elsewhere(name, copied)),
            finishing=finishing,
            ways_out=tuple(dict.fromkeys(map(self.layout.way_out, kernel.configs))),
        )

    # -- what TMA copies -------------------------------------------------------------------------------------

    def _list_boxes(self, copied: Sequence[Load]) -> tuple[str, ...]:
        rows = self.kernel.rows
        matrices = ("q",) if self.layout.copies_rows else ("q", "k", "v")
        named = dict.fromkeys(rows[name].tensor if name in rows else name for name in matrices)
        return (*named, *(load.tensor for load in copied))

    def _is_read_elsewhere(self, tensor: str, copied: Sequence[Load]) -> bool:
        if not copied:
            return False
        loads = (load for load in self._list_loads() if load not in copied)
        return any(load.tensor == tensor for load in loads)

    def _list_loads(self) -> Iterator[Load]:
        for expr in (*self._expressions(), *expressions_within((self.kernel.epilogue,))):
            yield from (node for node in walk(expr) if isinstance(node, Load))

    # -- the scheduler --------------------------------------------------------------------------------------

    @property
    def _sizes(self) -> tuple[str, ...]:
        names = {item.name for item in self.kernel.program if isinstance(item, Let)} & {"M", "N"}
        return tuple(sorted(names | ({"M"} if self.kernel.grid.sequences is not None else set())))

    @property
    def _clears_values(self) -> bool:
        return self.kernel.step.kept is not None or ("N" in self._sizes and self.layout.copies != "rows")

    def _has_one_stage(self) -> bool:
        return any(config.stages == 1 for config in self.kernel.configs)

    def _expressions(self) -> Iterator[Expr]:
        kernel = self.kernel
        return expressions_within((kernel.program, kernel.outer, kernel.regions, kernel.step, kernel.softmax))

    def _searches(self) -> bool:
        return any(isinstance(node, Search) for expr in self._expressions() for node in walk(expr))

    def _searches_in_tiles(self) -> bool:
        """Returns whether the test of a tile searches, which a producer does, that is one lane."""
        exprs = (expr for x in self.kernel.regions.tests for expr in statement_expressions(x))
        return any(isinstance(node, Search) for expr in exprs for node in walk(expr))

    def _has_own_ranges(self, softmax: ScoreRoles) -> bool:
        kernel, layout = self.kernel, self.layout
        others = any(config.tile_q - WGMMA_ROWS >= config.tile_kv for config in kernel.configs)
        together = (
            layout.clusters
            or self._clears_values
            or layout.draws
            or kernel.grid.sequences is not None
            or any(layout.way_out(config) == "v" for config in kernel.configs)
            or guard_of(kernel.regions) is not None
            or any(loop.listed is not None for loop in kernel.regions.loops)
            or ("k" in kernel.rows and kernel.rows["k"].page)
            or softmax.pair is not None
        )
        of_rows = any({"q_lo", "q_hi"} & names_in(item) for item in kernel.regions.bounds)
        return bool(others and of_rows and not together)

    def _plan_work(self, softmax: ScoreRoles, *, own_ranges: bool) -> WorkTile:
        kernel, sequences = self.kernel, self.kernel.grid.sequences
        all_see = find_key_that_all_see(kernel)
        place = ("h", "b", *(("q_first", "q_rows") if sequences is not None else ()))
        first = tuple(rows.first for rows in kernel.rows.values() if rows.first is not None)
        statements = (*kernel.program, *kernel.regions.bounds)
        values = (item.name for item in statements if is_short_integer(item, self.dtypes))
        sizes = tuple(name for name in ("M", "N") if name in self._sizes)
        always, wanted = (*place, *sizes, *first), self._find_wanted()
        candidates = dict.fromkeys((*place, *sizes, "q_hi", *first, *values))
        published = [name for name in candidates if name in always or name in wanted]
        if all_see is not None and kernel.softmax.headroom:
            published.append(ALL_SEE)
        bounds = {item.name for item in kernel.regions.bounds} | ({ALL_SEE} if all_see is not None else set())
        late, late_bounds = list_unpublished(kernel, self.dtypes), unpublished_bounds(kernel, self.dtypes)
        of_tests = kernel.regions.tests if guard_of(kernel.regions) is not None else None
        table = {kernel.rows["k"].table} if "k" in kernel.rows else set()
        by_producers = table | (set() if of_tests is None else self._read_by(of_tests, late_bounds))
        return WorkTile(
            published=tuple(published),
            own=tuple(name for name in published if name in bounds) if own_ranges else (),
            sizes=self._sizes,
            all_see=all_see,
            seen=find_keys_that_all_see(kernel),
            scheduled=tuple(self._list_scheduled(late_bounds)),
            consumed=tuple(late),
            produced=tuple(item for item in late if item.name in by_producers),
            walked=tuple(map(self._from_cluster, late_bounds) if self.layout.clusters else late_bounds),
            readers=1 + softmax.loads_keys + (softmax.pair is not None) + 4 * self.layout.draws,
        )

    def _list_scheduled(self, late_bounds: Sequence[Fetch]) -> Iterator[Statement]:
        kernel = self.kernel
        integers = [item for item in kernel.program if is_short_integer(item, self.dtypes)]
        read = self._read_by((*integers, *kernel.regions.statements), late_bounds)
        return (item for item in kernel.program if item in integers or item.name in read)

    def _read_by(self, statements: Iterable[Statement], late_bounds: Sequence[Fetch]) -> set[str]:
        """Returns the names that loops and these statements read, by way of others too."""
        loops, items = self.kernel.regions.loops, (*self.kernel.program, *late_bounds)
        read = {name for loop in loops for expr in loop.expressions for name in names_of(expr)}
        read.update(*map(names_in, statements))
        return read.union(*map(names_in, needed_for(read, items)))

    def _from_cluster(self, fetch: Fetch) -> Fetch:
        first: dict[Expr, Expr] = {Index("q_lo"): Ref("cluster_lo", "int", natural=True)}
        load = cast(Load, substitute(fetch.load, first))
        return replace(fetch, load=load, guard=substitute(fetch.guard, first))

    def _find_wanted(self) -> frozenset[str]:
        kernel, step, softmax = self.kernel, self.kernel.step, self.kernel.softmax
        loops = kernel.regions.loops
        exprs: list[Expr] = [expr for loop in loops for expr in loop.expressions if expr != loops[-1].stop]
        exprs += [loops[-1].stop] if self._clears_values else []
        statements: list[Statement] = [*kernel.regions.tests, *kernel.outer]
        statements += [*list_unpublished(kernel, self.dtypes), *unpublished_bounds(kernel, self.dtypes)]
        statements += [*step.fetches, *step.masked_fetches]
        exprs += [expr for item in statements for expr in statement_expressions(item)]
        exprs += [
            x
            for x in (
                *(step.score, step.keep, step.kept, step.kept_inside, step.v_scale),
                *(softmax.sink, softmax.v_scale),
            )
            if x is not None
        ]
        if softmax.dropout is not None:
            exprs += [softmax.dropout.p, softmax.dropout.seed, softmax.dropout.head]
        exprs.append(kernel.stored)
        exprs += () if kernel.epilogue is None else kernel.epilogue.expressions
        nodes = (node for expr in exprs for node in walk(expr))
        return frozenset(node.name for node in nodes if isinstance(node, Ref | Dim | Index))

    def _verify_room(self, softmax: ScoreRoles) -> None:
        """Raises ValueError where the layout, which counts on the spec, has too little for the kernel."""
        layout, columns = self.layout, softmax.columns
        found = (len(columns), sum(column.of_key is not None for column in columns))
        if len(softmax.vectors) > layout.vectors or found != (layout.columns, layout.key_columns):
            room = f"{layout.vectors} values of keys and {layout.columns} columns"
            raise ValueError(f"{self.kernel.name}: shared memory is laid out for {room}")

    # -- the consumers --------------------------------------------------------------------------------------

    def _plan_softmax(self) -> ScoreRoles:
        kernel, step, layout = self.kernel, self.kernel.step, self.layout
        of_score = self._along_keys(step.fetches, step.score)
        of_mask = self._along_keys((*step.fetches, *step.masked_fetches), step.keep)
        of_values = self._along_keys(step.fetches, step.v_scale)
        found = (*(() if layout.columns else of_score), *of_mask, *of_values)
        loaded = tuple(dict.fromkeys(x for x in found if self._is_vector(x))) if layout.vectors else ()
        score = self._hoist(loaded)
        read = () if score is None else self._along_keys(step.fetches, score.value)
        scale = kernel.softmax.scale
        cap = None if score is None or not layout.capped else cap_of(score.value, scale)
        vectors: tuple[Fetch | Let, ...] = (
            *(() if score is None else score.keys),
            *(fetch for fetch in loaded if fetch in (*read, *of_mask, *of_values)),
        )
        return ScoreRoles(
            score=score,
            exponent=self._exponent(score),
            near=None if cap is None else exponent(cap.product, None),
            cap=cap,
            ends=None if step.keep is None else row_ends(step.keep),
            vectors=vectors,
            loaded=loaded,
            pair=self._find_pair(of_score, of_mask),
            of_keys=tuple(_list_of_keys(vectors, score, (*of_score, *of_mask, *of_values))),
        )

    def _hoist(self, loaded: tuple[Fetch, ...]) -> HoistedScore | None:
        step = self.kernel.step
        if step.score is None:
            return None
        if self.kernel.segments is not None:  # as decode kernels compute it, which share nothing
            return HoistedScore(step.score)
        if self.layout.columns:
            return in_columns(step.score, self.variant.attention.mask)
        elsewhere = (expr for expr in (step.keep, step.v_scale) if expr is not None)
        return shared_score(step.score, loaded, elsewhere)

    def _exponent(self, score: HoistedScore | None) -> Expr | None:
        if score is None:
            return None
        scale = self.kernel.softmax.scale
        return product_exponent(score, scale) if score.columns else exponent(score.value, scale)

    def _find_pair(self, of_score: tuple[Fetch, ...], of_mask: tuple[Fetch, ...]) -> Fetch | None:
        if not self.layout.pair_stages:
            return None
        found = (fetch for fetch in of_score if is_pair(fetch.load) and fetch not in of_mask)
        return next(fetch for fetch in found if self.dtypes[fetch.load.tensor].is_float)

    def _along_keys(self, fetches: tuple[Fetch, ...], expr: Expr | None) -> tuple[Fetch, ...]:
        candidates = [fetch for fetch in (*self.kernel.outer, *fetches) if "kv" in fetch.axes]
        return () if expr is None else fetches_for(candidates, expr)

    def _is_vector(self, fetch: Fetch) -> bool:
        dtype = self.dtypes[fetch.load.tensor]
        is_short = fetch.load.within is not None or dtype.is_float or dtype in _SHORT
        return fetch.axes == ("kv",) and is_short


def _loads_of_boxes(softmax: ScoreRoles, finishing: Finishing | None) -> tuple[Load, ...]:
    """Returns the loads that TMA does beside those of q, k and v."""
    pairs = () if softmax.pair is None else (softmax.pair.load,)
    staged = None if finishing is None else finishing.staged
    return pairs if staged is None or staged.rows_axis is None else (*pairs, staged.fetch.load)


def _list_of_keys(
    vectors: Sequence[Fetch | Let], score: HoistedScore | None, asked: Sequence[Fetch]
) -> Iterator[Statement]:
    """Yields the statements about each key. vectors: those that come through shared memory; asked: loads of
    an element.
    """
    loads = [fetch for fetch in dict.fromkeys(asked) if fetch.axes == ("kv",)]
    lets = [item for item in vectors if isinstance(item, Let)]
    columns = () if score is None else score.columns
    values = [*(let.value for let in lets), *(x.of_key for x in columns if x.of_key is not None)]
    loaded = [Ref(item.name, "float", ("kv",)) for item in vectors if isinstance(item, Fetch)]
    yield from fetches_for(loads, *loaded, *values)
    yield from lets


# --- what a work tile leaves to its readers


def list_unpublished(kernel: Forward, dtypes: Mapping[str, DType]) -> list[Statement]:
    """Returns the statements that each role computes for itself: pointers, and floats of a head."""
    return [item for item in kernel.program if not is_short_integer(item, dtypes)]


def unpublished_bounds(kernel: Forward, dtypes: Mapping[str, DType]) -> list[Fetch]:
    """Returns the values of the rows of queries that tests of key tiles read and that are not published:
    integers of 64 bits.
    """
    regions = kernel.regions
    loads = [x for x in regions.bounds if isinstance(x, Fetch) and not is_short_integer(x, dtypes)]
    read = {name for loop in regions.loops for expr in loop.expressions for name in names_of(expr)}
    wanted = needed_for(read.union(*map(names_in, regions.tests)), loads)
    return [load for load in loads if load in wanted]


def partial_tiles_end_the_range(kernel: Forward) -> bool:
    """Returns whether the partial tiles are the last ones, and no others are."""
    loops = kernel.regions.loops
    return len(loops) == 2 and loops[0].masked is False


def find_key_that_all_see(kernel: Forward) -> Expr | None:
    """Returns up to which key every row sees all, before that is rounded down to a tile; None where partial
    tiles do not end the range.
    """
    match kernel.regions.loops[0].stop:
        case Ref(name=name) if partial_tiles_end_the_range(kernel):
            lets = {x.name: x.value for x in kernel.regions.bounds if isinstance(x, Let)}
            return drop_alignment(lets.get(name))
    return None


def find_keys_that_all_see(kernel: Forward) -> tuple[Expr, Expr] | None:
    """Returns where a range begins and ends whose keys every row sees, where tiles at both ends may be
    partial; None where one end alone may be, or nothing is known of it.
    """
    match kernel.regions.loops:
        case (loop,) if isinstance(loop.masked, Or):
            ends = [side.right for side in loop.masked.operands if isinstance(side, Compare)]
            return (ends[0], ends[1]) if len(ends) == 2 else None
    return None


def drop_alignment(end: Expr | None) -> Expr | None:
    """x of `x // BLOCK_N * BLOCK_N`, alone or as the smaller one of it and another end, which stays; None for
    anything else.
    """
    match end:
        case Call(function="min", args=(first, second)):
            exact = drop_alignment(first)
            return None if exact is None else Call("min", (exact, second))
        case Binary(op="*", left=Binary(op="//", left=x, right=tile), right=other) if tile == other == _TILE:
            return x
        case _:
            return None
