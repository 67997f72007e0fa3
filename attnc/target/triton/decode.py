"""The pieces of the text of a decode kernel, of its look-ups in the block table, and of the kernel that joins
its splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

from attnc.expr.construct import ZERO
from attnc.expr.nodes import Dim, Expr, Index, walk
from attnc.model.tensors import Role
from attnc.plan.access import Rows
from attnc.plan.decode import has_fixed_splits
from attnc.plan.epilogue import list_lengths
from attnc.plan.ir import Arg, Decode, Epilogue, Fetch, Loop, Module, Statement, statement_expressions
from attnc.plan.ir.kernel import DotPart
from attnc.plan.signature import block
from attnc.target.kernel_view import OutputView
from attnc.target.quote import quote
from attnc.target.triton.kernel import MATRICES, KernelText
from attnc.target.triton.printer import offset, scalar, statement, tiled, under


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesText:
    """Calls of `_pages_of` (`templates/triton/device/_pages_of.py.jinja`).

    rows: of k, whose pages are those of v too; first: the loop that looks ahead; whole: its tiles have all of
    their rows; split: programs share a sequence.
    """

    rows: Rows
    first: Loop
    whole: bool
    split: bool

    def after(self, tiles: int) -> str:
        """Returns the pages of the first tile, the second or the third: looked up while q is on its way."""
        start = scalar(self.first.start) + ("", " + BLOCK_N", " + 2 * BLOCK_N")[tiles]
        if self.whole:
            return self._find_pages(start, scalar(self.first.stop), whole=True)
        return self._within(start, self.first)

    def later(self, loop: Loop) -> str:
        """Returns the pages of a tile further on: a look-up waits for all rows that were asked for before.

        Three tiles ahead a short split starts sooner; where programs have whole sequences, two are faster.
        Entry by entry, although they could be vectors: those the compiler asks for behind the rows of a tile.
        """
        ahead = "(3 if SPLIT else 2)" if self.split else "2"
        return self._within(f"kv_lo + {ahead} * BLOCK_N", loop)

    @property
    def own(self) -> str:
        return self._find_pages("kv_lo", "N")

    def _within(self, start: str, loop: Loop) -> str:
        return self._find_pages(start, f"tl.where({start} < {scalar(loop.stop)}, N, 0)")

    def _find_pages(self, start: str, stop: str, whole: bool = False) -> str:
        k, form = self.rows, "SPLIT" if self.split else "False"
        where = f"{k.table}, {k.table_stride}, {start}, {stop}"
        return f"_pages_of({where}, {whole}, {form}, BLOCK_N, {k.page})"


class DecodeText(KernelText):
    """Attribute by attribute what `templates/triton/decode.py.jinja` prints."""

    kernel: Decode
    step_name = "_decode_step"

    def __init__(self, module: Module, kernel: Decode) -> None:
        super().__init__(module, kernel)
        assert isinstance(kernel, Decode), "the structure says so"
        self.group = None if kernel.walk.group is None else scalar(kernel.walk.group)
        if self.group is not None:
            self.view = OutputView(module, kernel, "h_kv")

    @property
    def tile_functions(self) -> tuple[str, ...]:
        """Device functions that load tiles of keys."""
        if self.gathers:
            return ("_find_keys", "_gather_tile", *(("_gather_paged",) if self.pages else ()))
        return ("_load_tile", *(("_ask_for_table", "_pages_of", "_load_paged") if self.pages else ()))

    # -- rows ----------------------------------------------------------------------------------------------

    @property
    def all_rows(self) -> str:
        return "M" if self.group is None else f"M * {self._divisor}"

    @property
    def find_tile_rows(self) -> list[str]:
        """Statements that count the tiles of a head, and find the first row of this one.

        Where each query is alone in its tiles, rows behind its heads would pass 32 bits sooner than anything
        in memory does: tiles are counted, not rows.
        """
        if self._alone is None:
            rows = f"row_tiles = tl.cdiv({self.all_rows}, BLOCK_M)"
            return [rows, "row_lo = tile % row_tiles * BLOCK_M"]
        queries = self.query_count if self._is_packed else "M"
        return [f"head_tiles = tl.cdiv({self._alone}, BLOCK_M)", f"row_tiles = {queries} * head_tiles"]

    @property
    def _is_packed(self) -> bool:
        return self.kernel.walk.sequences is not None

    @property
    def _alone(self) -> str | None:
        pack = self.kernel.pack
        return scalar(pack.group) if pack is not None and pack.alone else None

    @property
    def heads(self) -> list[str]:
        head, heads = self.kernel.walk.head, self.kernel.walk.heads
        if self._is_packed:
            lines = [f"{head} = tile // row_tiles"] if head else []
            return [*lines, "query_row = tile % row_tiles // head_tiles"]
        lines = ["b = tile // row_tiles"]
        if head:
            lines = ["head = tile // row_tiles", f"b = head // {heads}", f"{head} = head % {heads}"]
        if head == "h" and self.h_kv != "h":
            lines.append(f"h_kv = {self.h_kv}")
        if self._alone is not None:
            return [*lines, "q_lo = tile % row_tiles // head_tiles"]
        return [*lines, *([f"q_lo = {self._query_of('row_lo')}"] if self.view.reads("q_lo") else [])]

    def _query_of(self, row: str) -> str:
        return row if self.group is None else f"{row} // {self._divisor}"

    @property
    def _divisor(self) -> str:
        assert self.group is not None
        return self.group if self.group.isidentifier() else f"({self.group})"

    @property
    def last_row(self) -> list[str]:
        if self._alone is not None:
            return ["q_hi = q_lo"] if self.view.reads("q_hi") else []
        last = f"tl.minimum(row_lo + BLOCK_M, {self.all_rows}) - 1"
        if self.group is not None:
            last = f"({last}) // {self._divisor}"
        return [f"q_hi = {last}"] if self.view.reads("q_hi") else []

    @property
    def before_loads(self) -> tuple[Statement, ...]:
        """What a program finds out about itself without reading memory, while the kernel before it ends."""
        if self._is_packed:  # M is not known yet
            return ()
        return tuple(takewhile(lambda statement: not isinstance(statement, Fetch), self.kernel.program))

    @property
    def from_first_load(self) -> tuple[Statement, ...]:
        return self.kernel.program[len(self.before_loads) :]

    @property
    def asks_for_table(self) -> bool:
        asks = not self.gathers  # for entries that few keys need
        return asks and any(statement.name == self.view.rows("k").table for statement in self.before_loads)

    @property
    def rows_of_tile(self) -> list[str]:
        rows, head, heads = scalar(self.kernel.stored), self.kernel.walk.head, self._alone
        if heads is not None:
            first = f"{head} * {heads} + " if head else ""
            return [
                "head_of_group = tile % head_tiles * BLOCK_M + tl.arange(0, BLOCK_M)",
                "q_idx = q_lo + tl.zeros([BLOCK_M], tl.int32)",
                f"h = {first}tl.minimum(head_of_group, {heads} - 1)",
                f"exists = (q_idx < {rows}) & (head_of_group < {heads})",
            ]
        row = "row = row_lo + tl.arange(0, BLOCK_M)"
        if self.group is None:
            return [row, "q_idx = row", f"exists = row < {rows}"]
        first = f"{head} * {self.group} + " if head else ""
        exists = f"exists = row < {rows} * {self.group}"
        return [row, f"q_idx = {self._query_of('row')}", f"h = {first}row % {self.group}", exists]

    @property
    def advance(self) -> list[str]:
        moves = [line for line in super().advance if line.startswith(("K", "V"))]
        return [*self._to_sequence("q", "Q"), *moves]

    def _to_sequence(self, name: str, pointer: str) -> list[str]:
        zero = self.view.row_zero(name)
        if zero.first is not None:
            return [f"{pointer} += {zero.first}.to(tl.int64) * stride_{name}m"]
        if zero.tensor.axis(Role.BATCH) is None:
            return []
        return [f"{pointer} += b.to(tl.int64) * stride_{name}b"]

    @property
    def exists_when(self) -> str:
        rows = self.module.listed_rows
        if rows is not None and rows.marks:
            return "listed >= 0"
        return "q_idx < M" if self.view.clears else ""

    def row_at(self, name: str) -> str:
        """Returns pointers to rows of q, o or lse; the tensor's own pointer is at the sequence already."""
        pointer = MATRICES.get(name, f"{name}_ptr")
        return f"{pointer} + q_idx.to(tl.int64) * stride_{name}m + h.to(tl.int64) * stride_{name}h"

    @property
    def row_mask(self) -> str:
        return "exists[:, None]" + ("" if self.dv == self.block_dv else f" & (d[None, :] < {self.dv})")

    # -- parts of q and k ----------------------------------------------------------------------------------

    def _load_part(self, part: DotPart) -> str:
        width = block(part.width)
        columns = f"({part.first} + tl.arange(0, {width}))" if part.first else f"tl.arange(0, {width})"
        mask = "exists[:, None]"
        if width != part.width:
            mask += f" & ({columns} < {part.width})[None, :]"
        return f"tl.load(q_at[:, None] + {columns}[None, :], mask={mask}, other=0.0)"

    def _load_stored(self, name: str, width: int, first: int) -> str:
        rows = self.view.rows(name)
        of = rows.tensor
        x = f"{MATRICES[of]} + {first}" if first else MATRICES[of]
        if self.gathers and rows.page:
            where = f"{rows.table}, {rows.table_stride}, kv_idx, N, stride_{of}p, stride_{of}n"
            return f"_gather_paged({x}, {where}, {rows.page}, {self._width(width)})"
        if self.gathers:
            return f"_gather_tile({x}, kv_idx, N, stride_{of}n, {self._width(width)})"
        tile = f"{self._cut}, BLOCK_N"
        if not rows.page:
            return f"_load_tile({x}, kv_lo, N, stride_{of}n, {tile}, {self._width(width)})"
        where = f"page, kv_lo, N, stride_{of}p, stride_{of}n"
        return f"_load_paged({x}, {where}, {tile}, {rows.page}, {self._width(width)})"

    @property
    def _cut(self) -> str:
        return "True" if self.branches else "MASKED"

    # -- the walk over the keys ----------------------------------------------------------------------------

    @property
    def pages(self) -> PagesText | None:
        k, first = self.view.rows("k"), self.kernel.regions.loops[0]
        if not k.page:
            return None
        whole = self._cut == "MASKED" and first.masked is False  # as a step then does not mask them
        return PagesText(rows=k, first=first, whole=whole, split=self.kernel.split is not None)

    @property
    def find_pages(self) -> str:
        return ""

    def keys_of(self, loop: Loop) -> str:
        """Returns the range of a loop over keys. The few partial tiles after full ones are not worth filling
        a pipeline.
        """
        if loop.listed is not None:
            return super().keys_of(loop)
        bounds = f"{scalar(loop.start)}, {scalar(loop.stop)}, BLOCK_N"
        return f"tl.range({bounds}, num_stages=1)" if self._is_rest(loop) else f"range({bounds})"

    def _is_rest(self, loop: Loop) -> bool:
        return loop is not self.kernel.regions.loops[0] or loop.listed is not None

    @property
    def finds_first_pages(self) -> bool:
        return self.pages is not None and self.kernel.regions.loops[0].listed is None

    def looks_ahead(self, loop: Loop) -> bool:
        return self.pages is not None and not self._is_rest(loop)

    @property
    def again(self) -> tuple[Loop]:
        """A plain loop over all tiles, for what is seldom done: addresses and a pipeline would cost the
        kernel registers that the loops before it need.
        """
        first, last = self.kernel.regions.loops[0], self.kernel.regions.loops[-1]
        return (replace(last, start=first.start),)

    def step_arguments(self, loop: Loop) -> str:
        return self._arguments(self.step_names, loop)

    def _arguments(self, names: list[str], loop: Loop) -> str:
        """Returns arguments of a loop. Pages of the rest are looked up as they come: were those of the first
        loop used after it, the compiler would wait for them at the end of every step.
        """
        page = "own_page" if self._is_rest(loop) else "page"
        return ", ".join((*(page if name == "page" else name for name in names), *self._step_values(loop)))

    def _key_names(self, names: str) -> list[str]:
        table, stride = self.view.rows("k").table, self.view.rows("k").table_stride
        own = super()._key_names(names)
        if self.gathers:
            return ["kv_idx" if name == "kv_lo" else name for name in own]
        return [("page" if name == table else name) for name in own if name != stride] if table else own

    # -- a unified maximum ---------------------------------------------------------------------------------

    @property
    def _finds_top(self) -> bool:
        return self.kernel.unified is not None and self.kernel.unified.fallback

    @property
    def unified_result(self) -> str:
        return "acc, l, top" if self._finds_top else "acc, l"

    @property
    def _unified_names(self) -> list[str]:
        renamed = ["top" if name == "m" else name for name in self.step_names]
        return [name for name in renamed if name != "top" or self._finds_top]

    @property
    def unified_parameters(self) -> str:
        constants = [f"{name}: tl.constexpr" for name in self._step_constants()]
        return ", ".join([*self._unified_names, *constants])

    def unified_arguments(self, loop: Loop) -> str:
        return self._arguments(self._unified_names, loop)

    # -- splits --------------------------------------------------------------------------------------------

    @property
    def find_split(self) -> list[str]:
        """Lines of how many keys a split has."""
        if self.is_ordered:
            return [
                "# this program's split: a segment, or what the mask leaves of it",
                "split_size = SPLIT_SIZE",
            ]
        why = "# this program's split: whole tiles, as many as the others have, or what is left of them"
        even = f"split_size = tl.cdiv(tl.cdiv({self.visited}, BLOCK_N), SPLITS) * BLOCK_N"
        if not self.fixed_split:
            return [why, even]
        return [why, *under("SPLIT_SIZE > 0", ["split_size = SPLIT_SIZE"]), "else:", f"    {even}"]

    @property
    def visited(self) -> str:
        """Keys that the splits are of: none, not fewer, where a tile's rows stand before the first key."""
        split = self.kernel.split
        assert split is not None
        keys = scalar(split.hi) if split.lo == ZERO else f"{scalar(split.hi)} - {scalar(split.lo)}"
        return f"tl.maximum({keys}, 0)"

    @property
    def split_lo(self) -> str:
        split = self.kernel.split
        assert split is not None
        if split.segment and split.lo != ZERO:
            return f"tl.maximum(split * split_size, {scalar(split.lo)})"
        return "split * split_size" if split.lo == ZERO else f"{scalar(split.lo)} + split * split_size"

    @property
    def finishing(self) -> list[str]:
        return finish_rows(self, self.kernel.of_tile or self.kernel.epilogue)

    @property
    def row_number(self) -> str:
        sequences = self.kernel.walk.sequences
        if sequences is not None:
            return f"h * {scalar(sequences.rows)} + q_first + q_idx"
        return f"(b * H + h) * {scalar(self.kernel.stored)} + q_idx"

    @property
    def store(self) -> str:
        lines = [
            *self._to_sequence("o", "O"),
            f"o_at = {self.row_at('o')}",
            f"tl.store(o_at[:, None] + d[None, :], o.to({self.o_dtype}), mask={self.row_mask})",
        ]
        if self.view.has_lse:
            stores = [
                *self._to_sequence("lse", "lse_ptr"),
                f"lse_at = {self.row_at('lse')}",
                f"tl.store(lse_at, {self.form.lse}, mask=exists)",
            ]
            may_lack = ["if lse_ptr is not None:", *(f"    {line}" for line in stores)]
            lines += may_lack if self.may_lack_lse else stores
        return "\n".join(lines)

    @property
    def parameter_lines(self) -> list[list[str]]:
        tensors, *rest = super().parameter_lines
        return [[*tensors, *self._parts_pointers], *rest]

    @property
    def _parts_pointers(self) -> list[str]:
        counter = ["fallbacks_ptr"] if self._finds_top else []
        return [*([] if self.kernel.split is None else ["splits_ptr"]), *counter]

    @property
    def size_names(self) -> list[str]:
        return [*self.kernel.dims, *([] if self.kernel.split is None else ["SPLITS", "SPLIT_ROWS"])]

    @property
    def tiles(self) -> list[str]:
        split = [] if self.kernel.split is None else ["SPLIT"]
        return ["BLOCK_M", "BLOCK_N", *split, *self.fixed_split, "PDL"]

    @property
    def fixed_split(self) -> list[str]:
        return ["SPLIT_SIZE"] if has_fixed_splits(self.kernel) else []


def finish_rows(text: KernelText, epilogue: Epilogue | None) -> list[str]:
    """Returns the statements of an epilogue of o, [rows, columns]; none where there is none."""
    if epilogue is None:
        return []
    value = tiled(epilogue.value)
    return [
        f"# {quote(epilogue.span)}",
        *map(statement, epilogue.statements),
        f"o = tl.where((q_idx < M)[:, None], {value}, 0.0)" if text.view.clears else f"o = {value}",
    ]


class CombineText(KernelText):
    """Attribute by attribute what `templates/triton/combine.py.jinja` prints."""

    kernel: Decode

    @property
    def name(self) -> str:
        return f"{self.module.variant.attention.name}_combine"

    @property
    def parameter_lines(self) -> list[list[str]]:
        read = self._read
        of = [*(f"{arg.tensor.name}_ptr" for arg in read), "splits_ptr", "O"]
        tensors = [*of, *(["lse_ptr"] if self.view.has_lse else [])]
        strides = [found for x in (*read, *self.module.outputs) if (found := self.view.strides(x))]
        return [tensors, *strides, self.size_names, ["BLOCK_S", "PDL"]]

    @property
    def lengths(self) -> tuple[Statement, ...]:
        return () if self.kernel.epilogue is None else list_lengths(self.kernel)

    @property
    def finishing(self) -> list[str]:
        return finish_rows(self, self.kernel.epilogue)

    @property
    def _statements(self) -> tuple[Statement, ...]:
        epilogue = self.kernel.epilogue
        return () if epilogue is None else (*list_lengths(self.kernel), *epilogue.statements)

    @property
    def _expressions(self) -> list[Expr]:
        epilogue = self.kernel.epilogue
        found = [expr for item in self._statements for expr in statement_expressions(item)]
        return [*found, *([] if epilogue is None else [epilogue.value])]

    @property
    def _read(self) -> list[Arg]:
        names = {item.load.tensor for item in self._statements if isinstance(item, Fetch)}
        return [arg for arg in self.module.taken if arg.tensor.name in names]

    @property
    def size_names(self) -> list[str]:
        used = {node.name for x in self._expressions for node in walk(x) if isinstance(node, Dim)}
        used |= {"N"} if self.reads_q_pos else set()
        more = [name for name in self.kernel.dims if name in used - {"H", "M"}]
        sequences = self.kernel.walk.sequences
        own = ["H", "M"] if sequences is None else [scalar(sequences.rows)]
        return [*own, *more, "SPLITS", *([] if self.kernel.softmax.form == "none" else ["SPLIT_ROWS"])]

    @property
    def place(self) -> list[str]:
        """What the number of a row says; of packed rows, q_idx is that in memory."""
        sequences = self.kernel.walk.sequences
        if sequences is not None:
            rows = scalar(sequences.rows)
            return [f"q_idx = row % {rows}", f"h = row // {rows}"]
        return ["q_idx = row % M", "h = row // M % H", "b = row // M // H"]

    @property
    def reads_q_pos(self) -> bool:
        return any(Index("q_pos") in walk(x) for x in self._expressions)

    @property
    def split_mask(self) -> str:
        columns = "" if self.dv == self.block_dv else f" & (d[None, :] < {self.dv})"
        return f"(split < SPLITS)[:, None]{columns}"

    @property
    def o_offset(self) -> str:
        return self.offset("o")

    def offset(self, name: str) -> str:
        zero = self.view.row_zero(name)
        return offset(term for term in zero.terms if term[0] != zero.first)
