"""The pieces of a Hopper kernel's text that its templates place: what is known of a tile, and by whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import cast

from attnc.expr.nodes import Binary, Call, Compare, Dim, Expr, Index, Load, Or, Ref, Search, walk
from attnc.expr.simplify import substitute
from attnc.plan.ir import Arg, Fetch, Forward, Let, Module, Statement, statement_expressions
from attnc.plan.ir.kernel import expressions_within
from attnc.plan.sm90.layout import PIECE, TURN_THREADS, WGMMA_ROWS, Shape, Sm90Layout, widest_product
from attnc.plan.steps import is_short_integer, names_in, names_of, needed_for
from attnc.target.sm80.printer import (
    CudaWalk,
    at_row,
    scalar,
    sizes_of_call,
    statement,
)
from attnc.target.sm90.score import ScoreText
from attnc.target.sm90.tiles import parts_of

#: Matrices whose tiles are copied by TMA.
_COPIED = ("q", "k", "v")
_TILE = Dim("BLOCK_N")
#: Tiles for each block that the last heads have, which are walked through together.
_LAST_ROUNDS = 2
#: Key tiles that are left to be copied when the next tile is claimed, where its bounds are searched for.
_SEARCHED_AHEAD = 6


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
        self._check_room()

    @property
    def size_names(self) -> list[str]:
        """As the view says, without sections of heads: blocks are at different tiles of a head, which stays
        in the L2 cache, and not all of them begin a tile at once.
        """
        return list(self.kernel.dims)

    @cached_property
    def walk(self) -> CudaWalk:
        rounds = _LAST_ROUNDS if self.claims_late else 0
        walk = CudaWalk(walk=self.kernel.walk, of_call="", section="", last_rounds=rounds)
        return replace(walk, blocks="clusters", size="CLUSTER_M") if self.clusters else walk

    @property
    def of_cluster(self) -> str:
        """The factor of arrivals where every block of a cluster arrives."""
        return "CLUSTER * " if self.clusters else ""

    @property
    def box_rows(self) -> str:
        return "BLOCK_N // CLUSTER" if self.clusters else super().box_rows

    @property
    def claims_late(self) -> bool:
        """Whether a tile is taken from the counter late in the one before, so that it goes to the block that
        is free first: where the longest come first, and not the last rows of packed sequences.
        """
        return self.kernel.grid.longest_first and self.kernel.grid.sequences is None

    @property
    def claims_ahead(self) -> int:
        """How many key tiles are left to be copied when the next tile is claimed: searches take time."""
        return _SEARCHED_AHEAD if self.searches else 1

    def _check_room(self) -> None:
        """Raises ValueError where the text would use more shared memory than the plan has laid out."""
        layout, names = self.layout, [item.name for item in self.vectors]
        if len(names) > layout.vectors:
            raise ValueError(f"{self.kernel.name}: there is room for {layout.vectors} of {names}")
        found = (len(self.columns), len(self.key_columns))
        if found != (layout.columns, layout.key_columns):
            planned = (layout.columns, layout.key_columns)
            raise ValueError(f"{self.kernel.name}: columns and those of keys are {found}, planned {planned}")

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
        """Whether rows of v in a partial tile have to be made zero: TMA does so behind the tensor alone, and
        copies of single rows behind the last key.
        """
        return self.kernel.step.kept is not None or ("N" in self._made and not self.copies_rows)

    @property
    def partial(self) -> str:
        """Whether the tile at hand is partial."""
        return self.masked

    @property
    def partial_tiles_end_the_range(self) -> bool:
        """Whether the partial tiles are the last ones, and no others are."""
        loops = self.kernel.regions.loops
        return len(loops) == 2 and loops[0].masked is False

    @property
    def lazy_may_be_partial(self) -> bool:
        """Whether tiles for which no maximum is looked for may be partial."""
        return self.has_headroom and self.partial != "true" and not self.partial_tiles_end_the_range

    @cached_property
    def _met(self) -> tuple[str, Expr] | None:
        """Where partial tiles end the range: up to which key every row keeps all, before that is rounded down
        to a tile.
        """
        loops = self.kernel.regions.loops
        match loops[0].stop:
            case Ref(name=name) if self.partial_tiles_end_the_range:
                lets = {x.name: x.value for x in self.kernel.regions.bounds if isinstance(x, Let)}
                exact = unaligned(lets.get(name))
                return None if exact is None else ("all_see_hi", exact)
        return None

    @property
    def met(self) -> str:
        """The declaration of that key; empty if there is none."""
        return f"const int {self._met[0]} = {scalar(self._met[1])};" if self._met else ""

    @property
    def all_rows_see(self) -> str:
        """Whether every row keeps a key of the tile at hand."""
        match self.kernel.regions.loops:
            case (loop,) if isinstance(loop.masked, Or):
                ends = [side.right for side in loop.masked.operands if isinstance(side, Compare)]
                if len(ends) == 2:
                    first, last = map(scalar, ends)
                    return f"max(kv_lo, {first}) < min(kv_lo + BLOCK_N, {last})"
        return f"kv_lo < {self._met[0]}" if self._met else "!is_partial(kv_lo)"

    @cached_property
    def own_ranges(self) -> bool:
        """Whether each warpgroup walks over the key tiles that its own rows see: where they may be fewer than
        those of all rows, and where nothing is done by all warpgroups together.
        """
        if self.through_v or self.clusters:
            return False
        others = any(config.tile_q - WGMMA_ROWS >= config.tile_kv for config in self.kernel.configs)
        together = self.clears_values or self.draws or self.kernel.grid.sequences is not None
        alone = not (together or self.guard or self.page or self.pair_load)
        return others and alone and any(map(self._is_of_rows, self.kernel.regions.bounds))

    @staticmethod
    def _is_of_rows(item: Statement) -> bool:
        return bool({"q_lo", "q_hi"} & names_in(item))

    @property
    def own_names(self) -> list[str]:
        """What is published of each warpgroup's rows."""
        if not self.own_ranges:
            return []
        bounds = {item.name for item in self.kernel.regions.bounds} | ({self._met[0]} if self._met else set())
        return [name for name in self.published if name in bounds]

    @property
    def lo_of_all(self) -> str:
        """Where the keys of all rows of a tile begin."""
        return "work.first_tile" if self.lo in self.own_names else self.lo

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
    def _made(self) -> frozenset[str]:
        """Sizes that are found on the device."""
        names = {item.name for item in self.kernel.program if isinstance(item, Let)} & {"M", "N"}
        return frozenset(names | ({"M"} if self.kernel.grid.sequences is not None else set()))

    @cached_property
    def published(self) -> list[str]:
        """Integers that those who copy and multiply read: its place, its lengths, and bounds of its keys."""
        wanted = self._wanted
        sequences = self.kernel.grid.sequences
        place = ["h", "b", *(["q_first", "q_rows"] if sequences is not None else [])]
        first = [rows.first for rows in self.kernel.rows.values() if rows.first is not None]
        statements = (*self.kernel.program, *self.kernel.regions.bounds)
        values = [item.name for item in statements if self._is_integer(item)]
        sizes = [name for name in ("M", "N") if name in self._made]
        candidates = dict.fromkeys((*place, *sizes, "q_hi", *first, *values))
        found = [name for name in candidates if name in (*place, *sizes, *first) or name in wanted]
        return [*found, *([self._met[0]] if self._met and self.has_headroom else [])]

    def _is_integer(self, item: Statement) -> bool:
        return is_short_integer(item, self.dtypes)

    @cached_property
    def _wanted(self) -> frozenset[str]:
        """Names that are read after a tile has been found."""
        kernel = self.kernel
        loops = kernel.regions.loops
        exprs: list[Expr] = [expr for loop in loops for expr in loop.expressions if expr != loops[-1].stop]
        exprs += [loops[-1].stop] if self.clears_values else []
        statements: list[Statement] = [*kernel.regions.tests, *kernel.outer, *self._late, *self._late_bounds]
        statements += [*kernel.step.fetches, *kernel.step.masked_fetches]
        exprs += [expr for item in statements for expr in statement_expressions(item)]
        softmax, step = kernel.softmax, kernel.step
        exprs += [
            x for x in (step.score, step.keep, step.kept, step.kept_inside, softmax.sink) if x is not None
        ]
        if softmax.dropout is not None:
            exprs += [softmax.dropout.p, softmax.dropout.seed, softmax.dropout.head]
        exprs.append(kernel.stored)
        nodes = [node for expr in exprs for node in walk(expr)]
        return frozenset(node.name for node in nodes if isinstance(node, Ref | Dim | Index))

    @cached_property
    def _late(self) -> list[Statement]:
        """What is not published, and so computed by whoever reads it: pointers, and floats of a head."""
        return [item for item in self.kernel.program if not self._is_integer(item)]

    @cached_property
    def _late_bounds(self) -> list[Fetch]:
        """What tests of key tiles read of the rows of queries and is not published: integers of 64 bits."""
        loads = [x for x in self.kernel.regions.bounds if isinstance(x, Fetch) and not self._is_integer(x)]
        read = {name for loop in self.kernel.regions.loops for x in loop.expressions for name in names_of(x)}
        wanted = needed_for(read.union(*map(names_in, self.tests)), loads)
        return [load for load in loads if load in wanted]

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
        yield f"int {', '.join(name for name in self.published if name not in self.own_names)};"
        if self.own_names:
            yield f"int {', '.join(f'{name}[CONSUMERS]' for name in self.own_names)};"
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
        yield from self._sizes(name for name in self._made if name != "M")

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
        return self._sizes(self._made)

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


def unaligned(end: Expr | None) -> Expr | None:
    """x of `x // BLOCK_N * BLOCK_N`, alone or as the smaller one of it and another end, which stays; None for
    anything else.
    """
    match end:
        case Call(function="min", args=(first, second)):
            exact = unaligned(first)
            return None if exact is None else Call("min", (exact, second))
        case Binary(op="*", left=Binary(op="//", left=x, right=tile), right=other) if tile == other == _TILE:
            return x
        case _:
            return None
