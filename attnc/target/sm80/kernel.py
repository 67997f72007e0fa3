"""The pieces of the text of a CUDA kernel that computes o: loops (one `for` runs over the tiles of all
regions), arguments, row values, expressions of a fragment; of a decode kernel also splits, and how they
are joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from attnc.expr.construct import ZERO
from attnc.expr.nodes import Dim, Expr, Search, walk
from attnc.model.dtypes import DType
from attnc.plan.decode import has_fixed_splits
from attnc.plan.ir import (
    Arg,
    Decode,
    Fetch,
    Forward,
    Let,
    Module,
    Statement,
    statement_expressions,
    unified_of,
)
from attnc.plan.sm80.layout import CudaLayout
from attnc.plan.steps import fetches_for
from attnc.target.kernel_view import OutputView, sizes_of_kernel
from attnc.target.sm80.dropout import Drawing
from attnc.target.sm80.elements import FRAGMENT, Elements
from attnc.target.sm80.loop import TileLoop
from attnc.target.sm80.printer import (
    STORED,
    CudaWalk,
    at_row,
    local,
    offset,
    scalar,
    sizes_of_call,
    statement,
    stored_type,
)
from attnc.target.sm80.shared import Copiers, SharedTiles
from attnc.target.sm80.thread import ThreadRows

#: Matrices whose rows are copied or stored in tiles, and what their places are called in a kernel.
PLACES = {"q": "queries", "k": "keys", "v": "values", "o": "outputs"}
#: Sizes that a sequence may shorten.
_LENGTHS = ("M", "N")

# --- a kernel that computes o


class CudaText:
    """Text of one kernel; attribute by attribute what `templates/cuda/*.jinja` print."""

    module: Module
    kernel: Forward | Decode
    view: OutputView
    elements: Elements
    tiles: SharedTiles
    copiers: Copiers
    loop: TileLoop
    dropout: Drawing
    thread: ThreadRows
    _fragment = FRAGMENT
    #: Columns of the attention that a backward reads, where they are stored 16 bytes at a time.
    kept_columns = ""

    def __init__(self, module: Module, kernel: Forward | Decode, layout: CudaLayout) -> None:
        self.module, self.kernel, self.layout = module, kernel, layout
        self.view = OutputView(module, kernel)
        self.dtypes = {
            arg.tensor.name: DType(arg.tensor.dtype) for arg in (*module.taken, *module.outputs, *module.kept)
        }
        by_warp = layout.warp_split == "kv" and layout.merge == "end"
        self.elements = Elements(is_f32=layout.is_f32, fragment=self._fragment)
        self.tiles = SharedTiles(
            layout=layout, page=self.page, by_warp=by_warp, streams_values=kernel.grid.over == "q"
        )
        self.copiers = Copiers(by_warp=by_warp)
        self.loop = self._plan_loop(TileLoop(kernel=kernel, dtypes=self.dtypes))
        self.dropout = Drawing(kernel.softmax.dropout)
        self.h_kv = scalar(kernel.kv_head)
        self.v_in_k = layout.v_in_k
        self.padded = layout.is_padded
        self.default = kernel.configs[0]
        self.element, self.element_param = STORED[layout.element], module.variant.element_param
        self.split = layout.warp_split
        self.thread = ThreadRows(
            kernel=kernel,
            dtypes=self.dtypes,
            computed=(*kernel.program, *kernel.outer, *kernel.step.fetches, *kernel.step.masked_fetches),
            split=self.split,
            row="warp * WARP_M + 8 * r + g" if self.split == "q" else "8 * r + g",
        )
        kept = {arg.tensor.name for arg in module.kept}
        self.wants_lse = "args.lse_ptr != nullptr && " if "lse" in kept else ""
        self.keeps_attention = "attention" in kept
        self.scalar, self.expression = scalar, at_row
        self.unified = unified_of(kernel)
        self.finds_top = self.unified is not None and self.unified.fallback

    def _plan_loop(self, loop: TileLoop) -> TileLoop:
        return loop

    @property
    def times_scale(self) -> str:
        return "" if self.kernel.softmax.scale is None else " * SCALE"

    @property
    def excluded(self) -> str:
        return "-INF" if self.kernel.softmax.normalises else "0.0f"

    @property
    def group(self) -> str:
        """Heads that share keys and fill the rows of a tile together; empty where they do not."""
        return ""

    # -- the tile at hand ----------------------------------------------------------------------------------

    @cached_property
    def walk(self) -> CudaWalk:
        return CudaWalk(walk=self.kernel.walk, of_call="")

    @property
    def tiles_of_grid(self) -> str:
        tiles = CudaWalk(walk=self.kernel.walk, of_call="args.").tiles
        return f"{tiles} * args.B * args.H" if self.kernel.grid.sequences is None else f"({tiles}) * args.H"

    @property
    def program(self) -> Iterator[str]:
        declared = {*self.kernel.dims, *(["M"] if self.kernel.grid.sequences is not None else [])}
        for item in self.kernel.program:
            if isinstance(item, Let) and item.name in _LENGTHS and item.name not in declared:
                declared.add(item.name)
                yield f"int {item.name} = {scalar(item.value)};"
            else:
                yield statement(item, self.dtypes, tuple(declared))

    # -- rows in global memory -----------------------------------------------------------------------------

    @property
    def page(self) -> int:
        return self.view.rows("k").page

    @property
    def page_entry(self) -> str:
        """What the table says of key `kv_idx`."""
        rows = self.view.rows("k")
        return f"(int){rows.table}[(long long)(kv_idx / PAGE) * args.{rows.table_stride}]"

    @property
    def run(self) -> int:
        """Rows of a tile that surely lie in one page: tiles and shares start at multiples of 16."""
        return math.gcd(self.page, 16)

    @property
    def table_type(self) -> str:
        name = self.view.rows("k").table_stride.removeprefix("stride_").rsplit("_", 1)[0]
        return STORED[self.dtypes[name]]

    @property
    def places(self) -> Iterator[str]:
        yield from (self.place(name) for name in "qkv" if name != "v" or not self.v_in_k)

    def place(self, name: str) -> str:
        """Returns where the rows of a matrix lie, as a declaration."""
        rows = self.view.rows(name)
        of, letter = rows.tensor, "n" if name in ("k", "v") else "m"
        first = f"args.{of}_ptr + {self.offset(name)}"
        if rows.page:
            strides = f"args.stride_{of}p, args.stride_{of}n"
            table = f"{rows.table}, args.{rows.table_stride}"
            return f"const Pages {PLACES[name]} = {{{first}, {strides}, {table}}};"
        element = "element" if name == "o" else "const element"
        return f"const Rows<{element}> {PLACES[name]} = {{{first}, args.stride_{of}{letter}}};"

    def offset(self, name: str) -> str:
        """Returns the offset from the first element to row 0 of the sequence and head at hand; in pages, to
        the head.
        """
        return offset(self.view.row_zero(name))

    @property
    def lse_row(self) -> str:
        return f"args.lse_ptr[{self.offset('lse')} + row * args.stride_lsem]"

    # -- rows that do not exist ----------------------------------------------------------------------------

    @property
    def stored(self) -> str:
        return scalar(self.kernel.stored)

    def if_exists(self, value: str, otherwise: str) -> str:
        return f"row < M ? {value} : {otherwise}" if self.view.clears else value

    # -- types and arguments -------------------------------------------------------------------------------

    @property
    def fields(self) -> Iterator[str]:
        if self.maps:
            yield f"TensorMap {', '.join(f'{name}_map' for name in self.maps)};"
        for arg in self.arguments:
            const = "const " if arg in self.module.taken else ""
            stored = stored_type(self.dtypes[arg.tensor.name], self.module.variant)
            yield f"{const}{stored}* {arg.tensor.name}_ptr;"
        if self.kernel.grid.over == "head":
            yield "float *acc_ptr, *l_ptr, *m_ptr;"
        yield from self.more_pointers
        for names in (*map(self.view.strides, self.arguments), *self.more_strides):
            if names:
                yield f"long long {', '.join(names)};"
        yield f"int {', '.join(self.size_names)};"

    @property
    def size_names(self) -> list[str]:
        return sizes_of_kernel(self.kernel)

    @property
    def maps(self) -> list[str]:
        """Tensors that TMA copies, whose maps are arguments."""
        return []

    @property
    def more_pointers(self) -> list[str]:
        return []

    @property
    def more_strides(self) -> list[list[str]]:
        """Strides, tensor by tensor, besides those of `arguments`."""
        return []

    @property
    def arguments(self) -> list[Arg]:
        return [*self.module.taken, *self.module.outputs, *self.module.kept]

    @property
    def sizes(self) -> Iterator[str]:
        """`const int M = args.M;`: sizes by their names; those that a `length` shortens may change."""
        shortened = {item.name for item in self.kernel.program if isinstance(item, Let)}
        by_head = self.kernel.grid.over == "head" and not any(
            Dim("B") in walk(expr) for expr in self.thread.expressions()
        )
        dims = [name for name in self.kernel.dims if not (name == "B" and by_head)]
        yield from sizes_of_call(name for name in dims if name not in shortened)
        yield from sizes_of_call((name for name in dims if name in shortened), "int")

    @property
    def v_scale(self) -> str:
        """What row r of o is multiplied by; empty: nothing."""
        factor = self.kernel.softmax.v_scale
        return "" if factor is None else at_row(factor)

    # -- statements and expressions ------------------------------------------------------------------------

    def statement(self, item: Statement) -> str:
        return statement(item, self.dtypes, self.kernel.dims)

    @property
    def pair_loads(self) -> tuple[str, ...]:
        """The lines that load row r for an epilogue, two columns at a time."""
        return ()

    @property
    def pair_orders(self) -> tuple[str, ...]:
        """The lines that bring what was loaded of row r in order."""
        return ()

    @property
    def pair_arrays(self) -> tuple[str, ...]:
        """The arrays that they load it to."""
        return ()

    def finishing(self, item: Statement) -> str:
        return statement(item, self.dtypes, self.kernel.dims, scalar)

    def key_statements(self, items: Iterable[Fetch]) -> Iterator[str]:
        """Yields loads of a key, which are the same for all rows of a thread."""
        return (self.statement(item) for item in items if "q" not in item.axes)

    def element_statements(self, items: Iterable[Fetch]) -> Iterator[str]:
        return (self.statement(item) for item in items if "q" in item.axes)

    @property
    def score_fetches(self) -> tuple[Fetch, ...]:
        return self.fetches_along_keys(self.kernel.step.fetches, self.kernel.step.score)

    @property
    def mask_fetches(self) -> tuple[Fetch, ...]:
        step = self.kernel.step
        return self.fetches_along_keys((*step.fetches, *step.masked_fetches), step.keep)

    @property
    def value_fetches(self) -> tuple[Fetch, ...]:
        return self.fetches_along_keys(self.kernel.step.fetches, self.kernel.step.v_scale)

    def fetches_along_keys(self, fetches: tuple[Fetch, ...], expr: Expr | None) -> tuple[Fetch, ...]:
        candidates = [fetch for fetch in (*self.kernel.outer, *fetches) if "kv" in fetch.axes]
        return () if expr is None else fetches_for(candidates, expr)

    @property
    def split_keep(self) -> bool:
        keep = self.kernel.step.keep
        return keep is not None and len(at_row(keep)) > 40

    # -- loops ---------------------------------------------------------------------------------------------

    @property
    def own_split(self) -> list[str]:
        return []

    @property
    def searches(self) -> bool:
        regions, sink = self.kernel.regions, self.kernel.softmax.sink
        items = (*regions.statements, *self._fetches())
        exprs = [
            *self.thread.expressions(),
            *(expr for loop in regions.loops for expr in loop.expressions),
        ]
        exprs += [expr for item in items for expr in statement_expressions(item)]
        exprs += [] if sink is None else [sink]
        return any(isinstance(node, Search) for expr in exprs for node in walk(expr))

    def _fetches(self) -> Iterator[Fetch]:
        kernel = self.kernel
        for item in (*kernel.program, *kernel.outer, *kernel.regions.statements):
            if isinstance(item, Fetch):
                yield item
        yield from (*kernel.step.fetches, *kernel.step.masked_fetches)


class CudaDecodeText(CudaText):
    """Attribute by attribute what `templates/cuda/decode.cu.jinja` and `combine.cu.jinja` print."""

    kernel: Decode

    def __init__(self, module: Module, kernel: Decode, layout: CudaLayout) -> None:
        super().__init__(module, kernel, layout)
        self.is_split = kernel.split is not None
        self.thread = replace(
            self.thread,
            tile="row_lo",
            group=self.group,
            first_head=self.first_head,
            is_split=self.is_split,
        )
        self.has_fixed_splits = has_fixed_splits(kernel)
        self.update = "q" if layout.warp_split == "q" or self.copiers.by_warp else "kv"
        self.finish = "rows" if layout.warp_split == "q" else "warps" if self.copiers.by_warp else "sums"
        self.combine_name = f"{module.variant.attention.name}_combine"

    def _plan_loop(self, loop: TileLoop) -> TileLoop:
        return replace(loop, end="split_hi") if self.kernel.split is not None else loop

    # -- rows ----------------------------------------------------------------------------------------------

    @property
    def group(self) -> str:
        group = self.kernel.walk.group
        return "" if group is None else scalar(group)

    def all_rows(self, queries: str) -> str:
        return f"{queries} * {self.group}" if self.group else queries

    @property
    def heads(self) -> list[str]:
        head, heads = self.kernel.walk.head, self.kernel.walk.heads
        if not head:
            return ["const int b = tile / row_tiles;", local("const int", q_lo=self.query_of("row_lo"))]
        place = {"b": f"tile / row_tiles / {heads}", head: f"tile / row_tiles % {heads}"}
        if self.group:
            numbers = ", ".join(f"{name} = {value}" for name, value in place.items())
            return [f"const int {numbers};", local("const int", q_lo=self.query_of("row_lo"))]
        return [local("const int", place, q_lo="row_lo"), local("const int", h_kv=self.h_kv)]

    @property
    def last_row(self) -> list[str]:
        last = f"min(row_lo + BLOCK_M, {self.all_rows('M')}) - 1"
        if self.group:
            last = f"({last}) / {self.group}"
        return [local("const int", q_hi=last)]

    def query_of(self, row: str) -> str:
        return f"{row} / {self.group}" if self.group else row

    def head_of(self, row: str) -> str:
        if not self.group:
            return "h"
        return f"{self.first_head}{row} % {self.group}"

    @property
    def first_head(self) -> str:
        head = self.kernel.walk.head
        return f"{head} * {self.group} + " if head else ""

    def place(self, name: str) -> str:
        if not self.group or name not in ("q", "o"):
            return super().place(name)
        first = f"args.{name}_ptr + b * args.stride_{name}b"
        if head := self.kernel.walk.head:
            first += f" + {head} * {self.group} * args.stride_{name}h"
        kind = "Heads<element>" if name == "o" else "Heads<const element>"
        strides = f"args.stride_{name}m, args.stride_{name}h"
        return f"const {kind} {PLACES[name]} = {{{first}, {strides}, {self.group}}};"

    @property
    def lse_at(self) -> str:
        return "args.lse_ptr[b * args.stride_lseb + head * args.stride_lseh + q * args.stride_lsem]"

    def if_exists(self, value: str, otherwise: str) -> str:
        return f"q < M ? {value} : {otherwise}" if self.view.clears else value

    # -- splits --------------------------------------------------------------------------------------------

    @property
    def more_pointers(self) -> list[str]:
        splits = ["float* o_splits_ptr;", "float* lse_splits_ptr;"] if self.is_split else []
        return [*splits, *(["int* fallbacks_ptr;"] if self.finds_top else [])]

    @property
    def size_names(self) -> list[str]:
        splits = ["SPLITS", *(["SPLIT_SIZE"] if self.has_fixed_splits else [])]
        return [*self.kernel.dims, *(splits if self.is_split else [])]

    @property
    def split_columns(self) -> int:
        return self.layout.dv

    @property
    def own_split(self) -> list[str]:
        split = self.kernel.split
        if split is None:
            return []
        lo, hi = scalar(split.lo), scalar(split.hi)
        visited = f"max({hi if split.lo == ZERO else f'{hi} - {lo}'}, 0)"
        tiles = f"({visited} + BLOCK_N - 1) / BLOCK_N"
        fixed = "args.SPLIT_SIZE > 0 ? args.SPLIT_SIZE : " if self.has_fixed_splits else ""
        first = "split * split_size" if split.lo == ZERO else f"{lo} + split * split_size"
        return [
            "// this block's split: whole tiles, as many as the others have, or what is left of them",
            f"const int split_size = {fixed}({tiles} + args.SPLITS - 1) / args.SPLITS * BLOCK_N;",
            f"const int split_lo = {first}, split_hi = min(split_lo + split_size, {hi});",
        ]

    def in_first_split(self, value: str, otherwise: str) -> str:
        return f"split == 0 ? {value} : {otherwise}" if self.is_split else value

    @property
    def split_row(self) -> str:
        return f"((long long)(b * H + head) * {self.stored} + q) * args.SPLITS + split"
