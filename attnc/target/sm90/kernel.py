"""The pieces of a Hopper kernel's text that its templates place: what is known of a tile, and by whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import cast

from attnc.expr.nodes import Compare, Expr, Index, Load, Or, Ref, Search, walk
from attnc.expr.simplify import substitute
from attnc.plan.ir import Arg, Fetch, Forward, Let, Module, Statement, statement_expressions
from attnc.plan.ir.kernel import expressions_within
from attnc.plan.sm90 import roles_of
from attnc.plan.sm90.layout import PIECE, TURN_THREADS, Shape, Sm90Layout, widest_product
from attnc.plan.sm90.roles import (
    ALL_SEE,
    list_unpublished,
    partial_tiles_end_the_range,
    unpublished_bounds,
)
from attnc.plan.steps import is_short_integer, names_in, names_of, needed_for
from attnc.target.sm80.printer import (
    CudaWalk,
    at_row,
    scalar,
    sizes_of_call,
    statement,
)
from attnc.target.sm90.places import lay_out
from attnc.target.sm90.score import ScoreText
from attnc.target.sm90.tiles import parts_of

#: Matrices whose tiles are copied by TMA.
_COPIED = ("q", "k", "v")


class Sm90Text(ScoreText):
    """Attribute by attribute what `templates/sm90/*.jinja` print; the rest is as for `cuda.sm_80`.

    One thread finds what tiles are; the others read in a record what it publishes of them.
    """

    kernel: Forward

    layout: Sm90Layout
    is_backward = is_decode = False

    def __init__(self, module: Module, kernel: Forward, layout: Sm90Layout) -> None:
        super().__init__(module, kernel, layout)
        self.shape: Shape = layout.shape(self.default)
        ways = [layout.way_out(config) for config in kernel.configs]
        self.through_q, self.through_v = "q" in ways, "v" in ways
        self.through_a_tile = self.through_q or "tile" in ways
        self.stores_by_tma, self.stores_by_thread = any(ways), not all(ways)
        names = ["O_TILES", *(f"O_THROUGH_{way.upper()}" for way in ("q", "v") if way in ways)]
        self.o_by_tma = f"({' || '.join(names)})" if len(names) > 1 else names[0]
        self.has_headroom = kernel.softmax.headroom > 0
        self.qk_panels, self.v_panels = layout.qk.width // PIECE, layout.v.width // PIECE
        in_tiles = (expr for x in kernel.regions.tests for expr in statement_expressions(x))
        alone = any(isinstance(node, Search) for expr in in_tiles for node in walk(expr))
        self.searches_together = self.searches and not alone  # who copies is one lane
        held = min(layout.shape(c).entry_registers for c in kernel.configs)
        self.sum_parts = parts_of(layout.dv_multiplied, widest_product(held))
        self.draws = kernel.softmax.dropout is not None
        self.clusters = layout.clusters
        self.roles = roles_of(kernel)
        self.claims, self.work = self.roles.claims, self.roles.work
        pairs, vectors, draws = self.pair_load is not None, self.vectors, self.draws
        self.memory = lay_out(
            "O_AT + O_BYTES",
            (
                ("pairs", "PAIR_AT + PAIR_STAGES * PAIR_BYTES", pairs),
                ("vectors", "X_AT + X_BYTES", vectors),
                ("kept", "KEPT_AT + STAGES * KEPT_BYTES", draws),
            ),
        )
        self.barriers = lay_out(
            "V_EMPTY + STAGES",
            (
                ("o", "O_EMPTY + 1", self.through_v),
                ("vectors", "X_EMPTY + STAGES", vectors),
                ("kept", "KEPT_EMPTY + STAGES", draws),
                ("pairs", "PAIR_EMPTY + PAIR_STAGES", pairs),
                ("message", "MESSAGE_FULL + 1", self.clusters),
            ),
        )

    @property
    def size_names(self) -> list[str]:
        """As the view says, without sections of heads: blocks are at different tiles of a head, which stays
        in the L2 cache, and not all of them begin a tile at once.
        """
        return list(self.kernel.dims)

    @cached_property
    def walk(self) -> CudaWalk:
        walk = CudaWalk(walk=self.kernel.walk, of_call="", section="", last_rounds=self.claims.last_rounds)
        return replace(walk, blocks="clusters", size="CLUSTER_M") if self.clusters else walk

    @property
    def of_cluster(self) -> str:
        """The factor of arrivals where every block of a cluster arrives."""
        return "CLUSTER * " if self.clusters else ""

    @property
    def box_rows(self) -> str:
        return "BLOCK_N // CLUSTER" if self.clusters else super().box_rows

    # -- tiles ---------------------------------------------------------------------------------------------

    @property
    def row(self) -> str:
        return "64 * consumer + 16 * warp + 8 * r + g"

    @property
    def exponent(self) -> str:
        """Of p, from a score."""
        return f"s[j][2 * r + c]{self.times_scale} - m[r]"

    @property
    def clears_values(self) -> bool:
        return self.roles.clears_values

    @property
    def partial(self) -> str:
        """Whether the tile at hand is partial."""
        return self.masked

    @property
    def partial_tiles_end_the_range(self) -> bool:
        return partial_tiles_end_the_range(self.kernel)

    @property
    def lazy_may_be_partial(self) -> bool:
        return self.roles.lazy_may_be_partial

    @property
    def met(self) -> str:
        """The declaration of the key before which every row sees all; empty if there is none."""
        found = self.work.all_see
        return "" if found is None else f"const int {ALL_SEE} = {scalar(found)};"

    @property
    def all_rows_see(self) -> str:
        """Whether every row keeps a key of the tile at hand."""
        match self.kernel.regions.loops:
            case (loop,) if isinstance(loop.masked, Or):
                ends = [side.right for side in loop.masked.operands if isinstance(side, Compare)]
                if len(ends) == 2:
                    first, last = map(scalar, ends)
                    return f"max(kv_lo, {first}) < min(kv_lo + BLOCK_N, {last})"
        return "!is_partial(kv_lo)" if self.work.all_see is None else f"kv_lo < {ALL_SEE}"

    @property
    def own_ranges(self) -> bool:
        return self.roles.own_ranges

    @property
    def lo_of_all(self) -> str:
        """Where the keys of all rows of a tile begin."""
        return "work.first_tile" if self.lo in self.work.own else self.lo

    @property
    def turn_threads(self) -> int:
        """Threads at the named barrier of a turn at issuing products."""
        return TURN_THREADS

    @property
    def searching_lanes(self) -> str:
        """How many lanes look for the same bound."""
        return "(32 / (BLOCK_M / 64))" if self.own_ranges else "32"

    @property
    def end(self) -> str:
        """Where the loop ends: who multiplies has no variable for what is none of the plan."""
        return self.hi

    @property
    def last_tile(self) -> str:
        """The last of the key tiles, or one below all of them."""
        if self.guard:
            return f"hi > {self.lo} ? previous((hi - 1) / BLOCK_N * BLOCK_N + BLOCK_N) : {self.lo} - BLOCK_N"
        return f"hi > {self.lo} ? (hi - 1) / BLOCK_N * BLOCK_N : {self.lo} - BLOCK_N"

    # -- arguments -----------------------------------------------------------------------------------------

    @property
    def arguments(self) -> list[Arg]:
        """What kernels read and write themselves: what comes as tiles may be loaded at other places, too."""
        kernel, copied = self.kernel, set(self.tma_loads)
        if (pair := self.pair_load) is not None:
            parts = (kernel.program, kernel.outer, kernel.regions, kernel.step, kernel.softmax)
            nodes = (node for expr in expressions_within(parts) for node in walk(expr))
            copied -= {node.tensor for node in nodes if isinstance(node, Load) and node != pair.load}
        return [arg for arg in super().arguments if arg.tensor.name not in copied]

    @property
    def tma_loads(self) -> list[str]:
        """Tensors that TMA copies from: values that are columns of the keys come from there."""
        copied = [name for name in _COPIED if name == "q" or not self.copies_rows]
        matrices = dict.fromkeys(self.rows(name).tensor for name in copied)
        return [*matrices, *([self.pair_load.load.tensor] if self.pair_load else [])]

    @property
    def copies_rows(self) -> bool:
        return self.layout.copies == "rows"

    @property
    def maps(self) -> list[str]:
        """Tensors that TMA copies from or to."""
        return [*self.tma_loads, *(["o"] if self.stores_by_tma else [])]

    @property
    def more_pointers(self) -> list[str]:
        return ["int* counter_ptr;"]

    # -- what is said of a tile ----------------------------------------------------------------------------

    @cached_property
    def _late(self) -> list[Statement]:
        """What is not published, and so computed by each role for itself."""
        return list_unpublished(self.kernel, self.dtypes)

    @cached_property
    def _late_bounds(self) -> list[Fetch]:
        return unpublished_bounds(self.kernel, self.dtypes)

    def _is_integer(self, item: Statement) -> bool:
        return is_short_integer(item, self.dtypes)

    @property
    def walked_program(self) -> list[str]:
        """The same as text. Blocks of a cluster walk over the same key tiles: those that all its rows ask
        for.
        """
        if not self.clusters:
            return [self.statement(load) for load in self._late_bounds]
        first: dict[Expr, Expr] = {Index("q_lo"): Ref("cluster_lo", "int", natural=True)}
        return [
            self.statement(
                replace(x, load=cast(Load, substitute(x.load, first)), guard=substitute(x.guard, first))
            )
            for x in self._late_bounds
        ]

    @property
    def work_fields(self) -> Iterator[str]:
        yield f"int {', '.join(name for name in self.work.published if name not in self.work.own)};"
        if self.work.own:
            yield f"int {', '.join(f'{name}[CONSUMERS]' for name in self.work.own)};"
        if self.has_headroom:
            yield "int tile, recompute;  // its number, and whether it is computed again"
            yield "u32 failed_rows[4 * CONSUMERS];  // of each warp, by bits: see 'Lazy maximum'"

    def _read_by(self, statements: Iterable[Statement]) -> set[str]:
        """Names that loops and these statements read, and what of the program these are computed from."""
        loops, items = self.kernel.regions.loops, (*self.kernel.program, *self._late_bounds)
        read = {name for loop in loops for expr in loop.expressions for name in names_of(expr)}
        read.update(*map(names_in, statements))
        return read.union(*map(names_in, needed_for(read, items)))

    @property
    def sizes(self) -> Iterator[str]:
        """As they are for all tiles; tiles are counted by all rows."""
        yield from self._sizes(name for name in self.work.sizes if name != "M")

    @property
    def found_program(self) -> Iterator[str]:
        """What is computed first: integers, and all that they, and bounds, are computed from."""
        kernel = self.kernel
        integers = [item for item in kernel.program if self._is_integer(item)]
        read = self._read_by((*integers, *kernel.regions.statements))
        declared = {*kernel.dims, *(["M"] if kernel.grid.sequences is not None else [])}
        shortened = {item.name for item in kernel.program if isinstance(item, Let)}
        for name in kernel.dims:
            if name in shortened:  # by the length of a sequence, which is another for the next tile
                yield f"int {name} = args.{name};"
        for item in kernel.program:
            if item in integers:
                yield self._integer(item, declared)
            elif item.name in read:
                yield self.statement(item)

    def _integer(self, item: Statement, declared: set[str]) -> str:
        """Returns the text of a statement; a length that shortens a size declared before is an assignment."""
        if isinstance(item, Let) and item.name in ("M", "N") and item.name not in declared:
            declared.add(item.name)
            return f"int {item.name} = {scalar(item.value)};"
        return statement(item, self.dtypes, tuple(declared))

    @property
    def multiplied_program(self) -> list[str]:
        """What is computed once for a tile by those who multiply."""
        return [self.statement(item) for item in self._late]

    @property
    def readers(self) -> int:
        """Warps besides those that multiply that read what is said of a tile: who copies, loads and draws."""
        return 1 + self.loads_keys + (self.pair_load is not None) + 4 * self.draws

    @property
    def values_come_late(self) -> bool:
        """Whether v is waited for where it is multiplied, and not before: what comes of pairs holds it up."""
        return self.pair_load is not None and not self.clears_values

    @property
    def copied_program(self) -> list[str]:
        """The same by who copies: what guards of tiles read, and the table of pages."""
        read = self._read_by(self.tests) if self.guard else set()
        read.add(self.rows("k").table)
        return [self.statement(item) for item in self._late if item.name in read]

    def _sizes(self, without: Iterable[str]) -> list[str]:
        left_out = set(without)
        return list(sizes_of_call(name for name in self.kernel.dims if name not in left_out))

    @property
    def sizes_but_made(self) -> list[str]:
        """Sizes of the call, without those of which the record says something else."""
        return self._sizes(self.work.sizes)

    # -- what leaves ---------------------------------------------------------------------------------------

    @property
    def is_whole_box(self) -> str:
        """Whether a warp's rows of o leave as one box; empty where they always do."""
        inside = f"q_lo + 64 * consumer + 16 * warp + 16 <= {self.stored}"
        conditions = [inside] if self.kernel.grid.sequences is not None else []
        return " && ".join([*conditions, *(["written == ~0u"] if self.has_headroom else [])])

    @property
    def is_no_box(self) -> str:
        """What stands against that."""
        reaches = ["would reach into the rows of the next sequence"]
        reasons = reaches if self.kernel.grid.sequences is not None else []
        return ", or ".join([*reasons, *(["has rows that are not written"] if self.has_headroom else [])])

    # -- rows ----------------------------------------------------------------------------------------------

    @property
    def seed(self) -> str:
        """The key of dropout's random words."""
        assert self.kernel.softmax.dropout is not None
        return scalar(self.kernel.softmax.dropout.seed)

    @property
    def first_m(self) -> str:
        """The sink, in base-2 units."""
        assert self.kernel.softmax.sink is not None
        return at_row(self.kernel.softmax.sink)
