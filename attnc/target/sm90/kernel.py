"""The text of a Hopper forward kernel, part by part, as its templates place it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from attnc.expr.nodes import COLUMN, TRUE, Compare, Const, Expr, Index, Load, Or, Search, uses, walk
from attnc.model.dtypes import DType
from attnc.plan.ir import Arg, Fetch, Forward, Module, Statement, statement_expressions
from attnc.plan.ir.kernel import expressions_within
from attnc.plan.sm90 import roles_of
from attnc.plan.sm90.layout import PIECE, TURN_THREADS, Shape, Sm90Layout, widest_product
from attnc.plan.sm90.narrow import CONVERTING_WARPS
from attnc.plan.sm90.roles import (
    ALL_SEE,
    partial_tiles_end_the_range,
)
from attnc.target.sm80.kernel import CudaText
from attnc.target.sm80.lists import CudaListsText
from attnc.target.sm80.loop import TileLoop
from attnc.target.sm80.printer import (
    CudaWalk,
    address,
    local,
    scalar,
    stored_type,
)
from attnc.target.sm90.conversion import ConversionText
from attnc.target.sm90.narrow import NarrowTiles
from attnc.target.sm90.places import Places, lay_out
from attnc.target.sm90.score import Scores
from attnc.target.sm90.stores import Stores
from attnc.target.sm90.tiles import FRAGMENT, Boxes, WgmmaTiles, list_key_tiles, parts_of
from attnc.target.sm90.work import Work

#: Matrices whose tiles are copied by TMA.
_COPIED = ("q", "k", "v")


class Sm90Text(CudaText):
    """Attribute by attribute what `templates/sm90/*.jinja` print; the rest is as for `cuda.sm_80`.

    work, score, stores: what roles compute of a work tile, of scores, and how o is stored; memory, barriers:
    where optional parts of shared memory begin, and their barriers.
    """

    kernel: Forward
    _fragment = FRAGMENT
    boxes: Boxes
    wgmma: WgmmaTiles

    layout: Sm90Layout
    score: Scores
    stores: Stores
    work: Work
    memory: Places
    barriers: Places
    body, frame, score_keys = "forward_q_kv", "module", "BLOCK_N"
    is_backward = is_decode = ascends = False

    def __init__(self, module: Module, kernel: Forward, layout: Sm90Layout) -> None:
        super().__init__(module.converted, kernel, layout)
        self.shape: Shape = layout.shape(self.default)
        self.stores = Stores(kernel, layout, self.stored)
        self.score = Scores(kernel, layout, self)
        row = "64 * consumer + 16 * warp + 8 * r + g"
        computed = tuple(item for item in self.thread.computed if item != self.score.pair)
        self.thread = replace(self.thread, row=row, computed=computed)
        self.has_headroom = kernel.softmax.headroom > 0
        self.qk_panels, self.v_panels = layout.qk.width // PIECE, layout.v.width // PIECE
        in_tiles = (expr for x in kernel.regions.tests for expr in statement_expressions(x))
        alone = any(isinstance(node, Search) for expr in in_tiles for node in walk(expr))
        self.searches_together = self.searches and not alone  # a producer is one lane
        held = min(layout.shape(c).entry_registers for c in kernel.configs)
        parts = parts_of(layout.dv_multiplied, widest_product(held))
        key_tiles, self.boxes = list_key_tiles(kernel), Boxes(self)
        self.wgmma = WgmmaTiles(
            layout,
            key_tiles=key_tiles,
            sum_columns=(columns for _, columns in parts),
            parts=parts,
            page=self.page,
            warps=CONVERTING_WARPS if layout.narrow else 1,
            more_wgmma=(f"WGMMA_RS_BF16({keys})" for keys in key_tiles if self.score.columns),
        )
        self.lists = None if module.lists is None else CudaListsText(module, module.lists, self.dtypes)
        self.conversion = None if module.conversion is None else ConversionText(module, self.dtypes)
        self.draws = kernel.softmax.dropout is not None
        self.clusters = layout.clusters
        self.roles = roles_of(kernel)
        self.work = Work(kernel, self.dtypes, clusters=layout.clusters)
        pairs, vectors, draws = self.score.pair is not None, self.score.vectors, self.draws
        self.memory = lay_out(
            "O_AT + O_BYTES",
            (
                ("raw", "RAW_END", bool(layout.narrow)),
                ("pairs", "PAIR_AT + PAIR_STAGES * PAIR_BYTES", pairs),
                ("vectors", "X_AT + X_BYTES", vectors),
                ("kept", "KEPT_AT + STAGES * KEPT_BYTES", draws),
            ),
        )
        self.narrow = NarrowTiles(self, layout.narrow, self.memory.at["raw"]) if layout.narrow else None
        self.barriers = lay_out(
            "V_EMPTY + STAGES",
            (
                ("o", "O_EMPTY + 1", self.stores.through_v),
                ("vectors", "X_EMPTY + STAGES", vectors),
                ("kept", "KEPT_EMPTY + STAGES", draws),
                ("pairs", "PAIR_EMPTY + PAIR_STAGES", pairs),
                ("message", "MESSAGE_FULL + 1", self.clusters),
                ("raw", "RAW_FULL + RAW_TILES * RAW_PARTS * PRODUCERS", bool(layout.narrow)),
            ),
        )

    def _plan_loop(self, loop: TileLoop) -> TileLoop:
        return replace(loop, end=loop.hi)

    @property
    def size_names(self) -> list[str]:
        """As the view says, without sections of heads: blocks are at different tiles of a head, which stays
        in the L2 cache, and not all of them begin a tile at once.
        """
        made = [] if self.conversion is None else self.conversion.dims
        return list(dict.fromkeys((*self.kernel.dims, *made)))

    @cached_property
    def walk(self) -> CudaWalk:
        walk = CudaWalk(
            walk=self.kernel.walk, of_call="", section="", last_rounds=self.work.claims.last_rounds
        )
        return replace(walk, blocks="clusters", size="CLUSTER_M") if self.clusters else walk

    @property
    def of_cluster(self) -> str:
        return "CLUSTER * " if self.clusters else ""

    @property
    def box_rows(self) -> str:
        return "BLOCK_N // CLUSTER" if self.clusters else self.wgmma.box_rows

    # -- scores --------------------------------------------------------------------------------------------

    @property
    def score_fetches(self) -> tuple[Fetch, ...]:
        return self.score.fetches

    @property
    def pair_loads(self) -> tuple[str, ...]:
        return tuple(map(self._pair_load, self._in_pairs))

    @property
    def pair_arrays(self) -> tuple[str, ...]:
        names = (fetch.name for fetch in self._in_pairs)
        return tuple(f"u32 {x}_pairs[ROWS][DV / 8];\nbool {x}_chunks[ROWS];" for x in names)

    @property
    def pair_orders(self) -> tuple[str, ...]:
        names = (fetch.name for fetch in self._in_pairs)
        return tuple(f"order_pairs({x}_pairs[r], {x}_chunks[r]);" for x in names)

    @property
    def kept_columns(self) -> str:  # type: ignore[override]  # computed here
        return self.wgmma.dv_stored

    @property
    def prefetches(self) -> tuple[str, ...]:
        """The lines that ask for 64 columns of a row that an epilogue loads, from column d on."""
        return tuple(map(self._prefetch, self._in_pairs))

    @property
    def _in_pairs(self) -> tuple[Fetch, ...]:
        epilogue = self.kernel.epilogue
        return () if epilogue is None else tuple(filter(self._is_row, epilogue.fetches))

    def _is_row(self, fetch: Fetch) -> bool:
        """Returns whether it loads the columns of a row in their order, of 16 bits."""
        *others, last = fetch.load.indices
        is_alone = last == Index(COLUMN) and not any(COLUMN in uses(x) for x in (*others, fetch.guard))
        return is_alone and self.dtypes[fetch.load.tensor] in (DType.F16, DType.BF16)

    def _pair_load(self, fetch: Fetch) -> str:
        """Returns the call that loads such a row; the columns of it begin where its last index is 0."""
        indices, exists = fetch.load.indices, "true" if fetch.guard == TRUE else scalar(fetch.guard)
        stride = f"args.stride_{fetch.load.tensor}_{len(indices) - 1}"
        at = self._column_of_row(fetch, Const(0))
        return f"{fetch.name}_chunks[r] = load_pairs({fetch.name}_pairs[r], &{at}, {stride}, {exists});"

    def _prefetch(self, fetch: Fetch) -> str:
        condition = "" if fetch.guard == TRUE else f"if ({scalar(fetch.guard)}) "
        return f"{condition}prefetch_line(&{self._column_of_row(fetch, Index(COLUMN))});"

    def _column_of_row(self, fetch: Fetch, column: Expr) -> str:
        tensor, row = fetch.load.tensor, fetch.row
        base, done = (f"args.{tensor}_ptr", 0) if row is None else (row.name, len(row.indices))
        return address(base, tensor, (*fetch.load.indices[:-1], column), scalar, done=done)

    def finishing(self, item: Statement) -> str:
        if not isinstance(item, Fetch) or item not in self._in_pairs:
            return super().finishing(item)
        kind = stored_type(self.dtypes[item.load.tensor], self.module.variant)
        pair = f"(unsigned short)({item.name}_pairs[r][j] >> 16 * c)"
        return local("const float", {item.name: f"to_float({kind}{{{pair}}})"})

    def statement(self, item: Statement) -> str:
        if isinstance(item, Fetch) and item in self.score.loaded:
            return self.score.vector_statement(item)
        if isinstance(item, Fetch) and item == self.score.pair:
            return local("const float", {item.name: self.score.pair_value})
        return super().statement(item)

    # -- tiles ---------------------------------------------------------------------------------------------

    @property
    def exponent(self) -> str:
        return f"s[j][2 * r + c]{self.times_scale} - m[r]"

    @property
    def clears_values(self) -> bool:
        return self.roles.clears_values

    @property
    def partial(self) -> str:
        return self.loop.masked

    @property
    def partial_tiles_end_the_range(self) -> bool:
        return partial_tiles_end_the_range(self.kernel)

    @property
    def lazy_may_be_partial(self) -> bool:
        return self.roles.lazy_may_be_partial

    @property
    def met(self) -> str:
        found = self.roles.work.all_see
        return "" if found is None else f"const int {ALL_SEE} = {scalar(found)};"

    @property
    def all_rows_see(self) -> str:
        match self.kernel.regions.loops:
            case (loop,) if isinstance(loop.masked, Or):
                ends = [side.right for side in loop.masked.operands if isinstance(side, Compare)]
                if len(ends) == 2:
                    first, last = map(scalar, ends)
                    return f"max(kv_lo, {first}) < min(kv_lo + BLOCK_N, {last})"
        return "!is_partial(kv_lo)" if self.roles.work.all_see is None else f"kv_lo < {ALL_SEE}"

    @property
    def lo_of_all(self) -> str:
        return "work.first_tile" if self.loop.lo in self.work.own else self.loop.lo

    @property
    def turn_threads(self) -> int:
        return TURN_THREADS

    @property
    def searching_lanes(self) -> str:
        return "(32 / (BLOCK_M / 64))" if self.work.own_ranges else "32"

    @property
    def last_tile(self) -> str:
        lo, last = self.loop.lo, "(hi - 1) / BLOCK_N * BLOCK_N"
        return f"hi > {lo} ? {f'previous({last} + BLOCK_N)' if self.loop.skips else last} : {lo} - BLOCK_N"

    # -- arguments -----------------------------------------------------------------------------------------

    @property
    def arguments(self) -> list[Arg]:
        kernel, copied = self.kernel, set(self.tma_loads)
        if (pair := self.score.pair) is not None:
            parts = (kernel.program, kernel.outer, kernel.regions, kernel.step, kernel.softmax)
            nodes = (node for expr in expressions_within(parts) for node in walk(expr))
            copied -= {node.tensor for node in nodes if isinstance(node, Load) and node != pair.load}
        return [arg for arg in super().arguments if arg.tensor.name not in copied]

    @property
    def tma_loads(self) -> list[str]:
        copied = [name for name in _COPIED if name == "q" or not self.copies_rows]
        matrices = dict.fromkeys(self.view.rows(name).tensor for name in copied)
        return [*matrices, *([self.score.pair.load.tensor] if self.score.pair else [])]

    @property
    def copies_rows(self) -> bool:
        return self.layout.copies == "rows"

    @property
    def maps(self) -> list[str]:
        return [*self.tma_loads, *(["o"] if self.stores.by_tma else [])]

    @property
    def more_pointers(self) -> list[str]:
        lists = ["int* _list_bits_ptr;"] if self.lists else []
        return [*lists, *(self.conversion.pointers if self.conversion else []), "int* counter_ptr;"]

    @property
    def more_strides(self) -> list[list[str]]:
        return self.conversion.strides if self.conversion else []

    # -- what is said of a tile ----------------------------------------------------------------------------

    @property
    def sizes(self) -> Iterator[str]:
        yield from self.work.scheduler_sizes

    @property
    def readers(self) -> int:
        return 1 + self.score.loads_keys + (self.score.pair is not None) + 4 * self.draws

    @property
    def values_come_late(self) -> bool:
        """Whether v is waited for where it is multiplied, and not before: what comes of pairs holds it up."""
        return self.score.pair is not None and not self.clears_values

    # -- rows ----------------------------------------------------------------------------------------------
