"""The pieces of a Hopper kernel's text that its templates place: what is known of a tile, and by whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from attnc.expr.nodes import Binary, Call, Compare, Dim, Expr, Index, Or, Ref, Search, walk
from attnc.plan.ir import Arg, Fetch, Forward, Let, Module, Row, Statement, statement_expressions
from attnc.plan.loads import axes_of
from attnc.plan.sm90.layout import PIECE, WGMMA_ROWS, Shape, Sm90Layout, widest_product
from attnc.plan.sm90.scores import Column, is_pair
from attnc.plan.sm90.softcap import Cap, cap_of
from attnc.plan.steps import fetches_for, is_short_integer, names_in, names_of, needed_for
from attnc.target.sm80.printer import (
    STORED,
    CudaWalk,
    at_row,
    local,
    scalar,
    sizes_of_call,
    statement,
    value_type,
)
from attnc.target.sm90.score import (
    Ends,
    Score,
    exponent,
    in_columns,
    product_exponent,
    row_ends,
    shared_score,
)
from attnc.target.sm90.tiles import BoxText, parts_of, wgmma

#: What is copied by TMA.
_COPIED = ("q", "k", "v")
_TILE = Dim("BLOCK_N")
#: Tiles for each block that the last heads have, which are walked through together.
_LAST_ROUNDS = 2
#: Key tiles that are left to be copied when the next tile is claimed, where its bounds are searched for.
_SEARCHED_AHEAD = 6


class Sm90Text(BoxText):
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
        self.qk_pieces, self.v_pieces = layout.qk.width // PIECE, layout.v.width // PIECE
        in_tiles = (expr for x in kernel.regions.tests for expr in statement_expressions(x))
        alone = any(isinstance(node, Search) for expr in in_tiles for node in walk(expr))
        self.searches_together = self.searches and not alone  # who copies is one lane
        held = min(layout.shape(c).entry_registers for c in kernel.configs)
        self.sum_parts = parts_of(layout.dv, widest_product(held))
        self.changes_scores = kernel.step.score is not None or kernel.step.keep is not None
        self.draws = kernel.softmax.dropout is not None
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
        return CudaWalk(walk=self.kernel.walk, of_call="", section="", last_rounds=rounds)

    @property
    def claims_late(self) -> bool:
        """Whether a tile is taken from the counter late in the one before, so that it goes to the block that
        is free first: where the longest come first.
        """
        return self.kernel.grid.longest_first

    @property
    def claims_ahead(self) -> int:
        """How many key tiles are left to be copied when the next tile is claimed: searches take time."""
        return _SEARCHED_AHEAD if self.searches or self.kernel.grid.sequences is not None else 1

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
        """Whether rows of v in a partial tile have to be made zero: TMA does so behind the tensor alone."""
        return self.kernel.step.kept is not None or "N" in self._made

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
    def settled_may_be_partial(self) -> bool:
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
                return None if exact is None else ("met_hi", exact)
        return None

    @property
    def met(self) -> str:
        """The declaration of that key; empty if there is none."""
        return f"const int {self._met[0]} = {scalar(self._met[1])};" if self._met else ""

    @property
    def all_meet(self) -> str:
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
        if self.through_v:
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
        return "record.first_tile" if self.lo in self.own_names else self.lo

    @property
    def searching_lanes(self) -> str:
        """How many lanes look for the same bound."""
        return "(32 / (BLOCK_M / 64))" if self.own_ranges else "32"

    @property
    def last_tile(self) -> str:
        """The last of the key tiles, or one below all of them."""
        if self.guard:
            return f"hi > {self.lo} ? previous((hi - 1) / BLOCK_N * BLOCK_N + BLOCK_N) : {self.lo} - BLOCK_N"
        return f"hi > {self.lo} ? (hi - 1) / BLOCK_N * BLOCK_N : {self.lo} - BLOCK_N"

    # -- arguments -----------------------------------------------------------------------------------------

    @property
    def arguments(self) -> list[Arg]:
        """What kernels read and write themselves."""
        return [arg for arg in super().arguments if arg.tensor.name not in self.tma_loads]

    @property
    def fields(self) -> Iterator[str]:
        """Declarations of the arguments: tensor maps, pointers, strides, sizes."""
        yield f"TensorMap {', '.join(f'{name}_map' for name in self.maps)};"
        yield from super().fields

    @property
    def tma_loads(self) -> list[str]:
        """Tensors that TMA copies from."""
        return [*_COPIED, *([self.pair_load.load.tensor] if self.pair_load else [])]

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
        statements: list[Statement] = [*kernel.regions.tests, *kernel.outer, *self._late]
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
        items = (*self.kernel.program, *(x for x in self.kernel.regions.bounds if isinstance(x, Row)))
        return [item for item in items if not self._is_integer(item)]

    @property
    def record_fields(self) -> Iterator[str]:
        yield f"int {', '.join(name for name in self.published if name not in self.own_names)};"
        if self.own_names:
            yield f"int {', '.join(f'{name}[CONSUMERS]' for name in self.own_names)};"
        if self.has_headroom:
            yield "int tile, again;  // its number; whether it is computed again"
            yield "u32 failed[4 * CONSUMERS];  // rows of each warp, by bits, whose maximum moved too far"

    def _read_by(self, statements: Iterable[Statement]) -> set[str]:
        """Names that loops and these statements read, and what of the program these are computed from."""
        loops = self.kernel.regions.loops
        read = {name for loop in loops for expr in loop.expressions for name in names_of(expr)}
        read.update(*map(names_in, statements))
        return read.union(*map(names_in, needed_for(read, self.kernel.program)))

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
        """A length that shortens a size is an assignment."""
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

    # -- what is loaded of each key --------------------------------------------------------------------------

    @cached_property
    def _loaded(self) -> tuple[Fetch, ...]:
        """Loads with one value for each key of the tile."""
        if not self.layout.vectors:
            return ()
        found = (*(() if self.layout.columns else super().score_fetches), *self.mask_fetches)
        return tuple(dict.fromkeys(fetch for fetch in found if self._is_vector(fetch)))

    def _is_vector(self, fetch: Fetch) -> bool:
        return fetch.axes == ("kv",) and self._vector_type(fetch) in ("float", "int", "bool")

    def _vector_type(self, item: Fetch | Let) -> str:
        return value_type(item, self.dtypes[item.load.tensor]) if isinstance(item, Fetch) else "float"

    @cached_property
    def score(self) -> Score | None:
        """The score, without what is computed once for a key or a row."""
        step = self.kernel.step
        if step.score is None:
            return None
        if self.layout.columns:
            return in_columns(step.score, self.module.variant.attention.mask)
        return shared_score(step.score, self._loaded, () if step.keep is None else (step.keep,))

    def row_of_score(self, let: Let) -> str:
        """What the score reads of each row, or of all rows, at a thread's first key."""
        value = f"(float)({at_row(let.value)})"
        if not axes_of(let.value):
            return f"const float {let.name} = {value};"
        values = ", ".join(value.replace("[r]", f"[{r}]") for r in range(2))
        return f"const float {let.name}[ROWS] = {{{values}}};"

    @cached_property
    def ends(self) -> Ends | None:
        """Where the keys of a row begin and end, if the mask of a partial tile says nothing else."""
        keep = self.kernel.step.keep
        return None if keep is None else row_ends(keep)

    @property
    def seen(self) -> str:
        """What a row keeps, by bits, of columns from 128 * w on."""
        assert self.ends is not None
        first, end = (
            None if end is None else f"columns_before({at_row(end)}, first_key + 128 * w)"
            for end in (self.ends.first, self.ends.end)
        )
        return f"{end} & ~{first}" if first and end else end or f"~{first}"

    @cached_property
    def exponent_of_score(self) -> Expr | None:
        """What p is 2 to the power of, from a product, where that is more than a multiplication."""
        if self.score is None:
            return None
        scale = self.kernel.softmax.scale
        if self.score.columns:
            return product_exponent(self.score, scale)
        return exponent(self.score.value, scale)

    @cached_property
    def cap(self) -> Cap | None:
        """The score, if it is a capped product, of which most are small."""
        if self.score is None or not self.layout.capped:
            return None
        return cap_of(self.score.value, self.kernel.softmax.scale)

    @property
    def capped_exponent(self) -> Expr:
        """Of p by the polynomial."""
        assert self.cap is not None
        return exponent(self.cap.product, None)

    @cached_property
    def vectors(self) -> tuple[Fetch | Let, ...]:
        """What comes through shared memory, 4 bytes a key: values of the score, and what is loaded for those
        who multiply.
        """
        of_keys = () if self.score is None else self.score.keys
        return (
            *of_keys,
            *(fetch for fetch in self._loaded if fetch in (*self.score_fetches, *self.mask_fetches)),
        )

    @property
    def columns(self) -> tuple[Column, ...]:
        """Terms that tensor cores add, and those among them of numbers of keys."""
        return () if self.score is None else self.score.columns

    @property
    def key_columns(self) -> list[tuple[int, str]]:
        """Where a number of each key lies among those of its columns, and its value."""
        of_keys = ((i, column.of_key) for i, column in enumerate(self.columns))
        return [(3 * i, at_row(value)) for i, value in of_keys if value is not None]

    @property
    def number_columns(self) -> list[tuple[int, str]]:
        """Where the number of a key in its tile lies, and what a row multiplies it by."""
        return [(3 * i, at_row(x.factor)) for i, x in enumerate(self.columns) if x.of_key is None]

    @property
    def loads_keys(self) -> bool:
        """Whether a warp loads what is asked of keys."""
        return bool(self.vectors or self.key_columns)

    @property
    def is_loaded(self) -> bool:
        """Whether those who multiply read what others have loaded, besides tiles of q, k and v."""
        return bool(self.vectors or self.pair_load)

    @property
    def of_row(self) -> str:
        """What is left of a score but for its columns; empty if nothing is."""
        return "" if self.score is None or self.score.of_row is None else at_row(self.score.of_row)

    @property
    def columns_wgmma(self) -> str:
        """Of bf16 whatever the type of q and k, a width of its own for each tile of keys."""
        return "\n\n".join(
            wgmma(keys, "bf16", registers=True, by_rows=False, name="wgmma_bf16") for keys in self.key_tiles
        )

    @property
    def score_fetches(self) -> tuple[Fetch, ...]:
        return () if self.score is None else self._in_step(self.kernel.step.fetches, self.score.value)

    @property
    def vector_values(self) -> Iterator[str]:
        """Declarations of what is loaded of one key, and computed of it; other loads may say where."""
        loads = [x for x in dict.fromkeys((*super().score_fetches, *self.mask_fetches)) if x.axes == ("kv",)]
        of_keys = (column.of_key for column in self.columns)
        lets = [x for x in self.vectors if isinstance(x, Let)]
        lets += [Let(name="_", value=value) for value in of_keys if value is not None]
        loaded = [Ref(x.name, "float", ("kv",)) for x in self.vectors if isinstance(x, Fetch)]
        items: list[Statement] = [*fetches_for(loads, *loaded, *(let.value for let in lets)), *lets]
        yield from map(super().statement, (item for item in items if item.name != "_"))

    def as_word(self, vector: Fetch | Let) -> str:
        """A value of one key as 4 bytes."""
        return f"(int){vector.name}" if self._vector_type(vector) == "bool" else vector.name

    def vector_places(self, *, of_score: bool) -> Iterator[str]:
        """Where a thread finds those of its first two keys; of_score: without what the mask alone asks."""
        for i, vector in enumerate(self.vectors):
            if not of_score or isinstance(vector, Let) or vector in self.score_fetches:
                place = f"X_AT + (x.at * VECTORS + {i}) * BLOCK_N * 4"
                yield f"const u32 {vector.name}_at = base + {place} + 8 * t;"

    def vector_statement(self, vector: Fetch | Let) -> str:
        """In a step, what was loaded of a key is there already: two neighbours at once."""
        kind, differs = self._vector_type(vector), " != 0" if self._vector_type(vector) == "bool" else ""
        value = f"of_pair<{kind.replace('bool', 'int')}>(load_shared<u64>({vector.name}_at + 32 * j), c)"
        return local(f"const {kind}", {vector.name: value + differs})

    def statement(self, item: Statement) -> str:
        if isinstance(item, Fetch) and item in self._loaded:
            return self.vector_statement(item)
        if isinstance(item, Fetch) and item == self.pair_load:
            return local("const float", {item.name: self._pair_value})
        return super().statement(item)

    # -- what is loaded of each query and key ----------------------------------------------------------------

    @cached_property
    def pair_load(self) -> Fetch | None:
        """What comes as tiles of queries and keys."""
        if not self.layout.pair_stages:
            return None
        found = (fetch for fetch in super().score_fetches if is_pair(fetch.load))
        return next(fetch for fetch in found if fetch not in self.mask_fetches and self._is_real(fetch))

    def _computed(self) -> tuple[Statement, ...]:
        return tuple(item for item in super()._computed() if item != self.pair_load)

    def _is_real(self, fetch: Fetch) -> bool:
        return self.dtypes[fetch.load.tensor].is_float

    @property
    def values_come_late(self) -> bool:
        """Whether v is waited for where it is multiplied, and not before: what comes of pairs holds it up."""
        return self.pair_load is not None and not self.clears_values

    @property
    def pair_by_pieces(self) -> bool:
        """Whether ldmatrix reads it, which has elements of 16 bits."""
        return self.layout.pair == 2

    @property
    def pair_place(self) -> str:
        """Where a box of its tile begins, but for its columns: row, and the axes before."""
        assert self.pair_load is not None
        others = [scalar(index) for index in reversed(self.pair_load.load.indices[:-2])]
        return ", ".join(["q_lo", *others, *["0"] * (2 - len(others))])

    @property
    def _pair_value(self) -> str:
        assert self.pair_load is not None
        if self.pair_by_pieces:
            return f"half_of<{STORED[self.dtypes[self.pair_load.load.tensor]]}>(values[j % 2 * 2 + r], c)"
        chunk = "(2 * j % 8 + t / 2 ^ g) * 16 + t % 2 * 8"
        return f"of_pair<float>(load_shared<u64>(pair_at + (j / 4 * BLOCK_M + 8 * r) * 128 + {chunk}), c)"

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
    def multiplied_sizes(self) -> list[str]:
        return self._sizes(self._made)

    @property
    def copied_sizes(self) -> list[str]:
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
