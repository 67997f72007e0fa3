"""The pieces of a Triton kernel's text that its template places: which tile is a program's, parameter lists,
offsets, tile loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attnc.expr.construct import ZERO
from attnc.expr.nodes import COLUMN, Binary, Index, Load, Ref, walk
from attnc.model.dtypes import DType
from attnc.plan.decode import decodes_packed_rows
from attnc.plan.ir import Arg, Decode, Fetch, Forward, Kernel, Loop, Module
from attnc.plan.ir.kernel import DotPart, Segments
from attnc.plan.ir.lists import ListWalk
from attnc.plan.lists import HIDES_SOME
from attnc.plan.regions import within
from attnc.plan.signature import block, feature, value_columns
from attnc.plan.triton.resources import FEWEST_FROM_SHARED
from attnc.target.kernel_view import OutputView, parts_of, sizes_of_kernel
from attnc.target.triton.columns import PartText, is_padded, scale_tile, widened_to
from attnc.target.triton.forms import FORMS, FormText
from attnc.target.triton.printer import (
    TL_DTYPES,
    counter,
    list_types,
    offset,
    scalar,
    tiled,
    transposed,
    under,
    unique,
    widening,
)


class ProgramText:
    """What texts of forward and backward kernels have in common."""

    module: Module
    kernel: Kernel

    def unless_described(self, lines: Iterable[str]) -> list[str]:
        """Returns lines of matrices that are pointers, and no descriptors."""
        return under("not TMA", lines) if self.kernel.tma else [*lines]

    @property
    def size_names(self) -> list[str]:
        return sizes_of_kernel(self.kernel)

    @property
    def tile_count(self) -> str:
        walk, rows = self.kernel.walk, scalar(self.kernel.walk.rows)
        if walk.sequences is not None:
            return f"{rows} // {walk.size} + B + 1"
        return f"{rows} // {walk.size}" if walk.is_padded else f"tl.cdiv({rows}, {walk.size})"

    @property
    def all_heads(self) -> str:
        walk = self.kernel.walk
        return walk.heads if walk.sequences is not None else f"B * {walk.heads}"

    @property
    def reads_h_kv(self) -> bool:
        return self.h_kv != "h" and (self.h_kv != "0" or self.kernel.tma)

    @property
    def h_kv(self) -> str:
        return scalar(self.kernel.kv_head)

    @property
    def find_sequence(self) -> str:
        return self.sequence_of("rank // heads", self.kernel.walk.size)

    def sequence_of(self, number: str, size: str) -> str:
        """Returns the call that finds the sequence of a tile of so many rows, and its place there."""
        sequences = self.kernel.walk.sequences
        assert sequences is not None
        cu, rows = sequences.cu_seqlens, scalar(sequences.rows)
        place = f"{cu}_ptr, stride_{cu}_0, {number}, B, {rows}"
        is_row = decodes_packed_rows(self.module)
        return f"_find_sequence_of_row({place})" if is_row else f"_find_sequence({place}, {size})"

    @property
    def find_query(self) -> list[str]:
        """Statements that find a packed query, whose number is `query_row`, where each has tiles of its own;
        none where queries are not packed.
        """
        if self.kernel.walk.sequences is None:
            return []
        return [
            f"b, q_first, q_rows, q_lo = {self.sequence_of('query_row', '1')}",
            "# what follows the last sequence has rows to write, but no queries",
            "M = tl.where(b < B, q_rows, 0)",
            "b = tl.minimum(b, B - 1)",
        ]

    @property
    def place_in_sequence(self) -> list[str]:
        """Lines that find the sequence, and the length that it has, of a tile of packed rows."""
        if self.kernel.walk.axis == "q":
            found, why = "b, q_first, q_rows, q_lo", "has rows to write, but no queries"
            length = "M = tl.where(b < B, q_rows, 0)"
        else:
            found, why, length = "b, k_first, N, kv_lo", "has no keys", "N = tl.where(b < B, N, 0)"
        return [f"{found} = {self.find_sequence}", f"# what follows the last sequence {why}", length]

    @property
    def query_count(self) -> str:
        sequences = self.kernel.walk.sequences
        assert sequences is not None
        rows = scalar(sequences.rows)
        return rows if decodes_packed_rows(self.module) else f"({rows} + B + 1)"

    def keys_of(self, loop: Loop) -> str:
        """Returns the range of a loop over keys. The tile or two at an edge are not worth filling a
        pipeline.
        """
        if loop.listed is not None:
            return self._listed_tiles(loop.listed)
        bounds = f"{scalar(loop.start)}, {scalar(loop.stop)}, BLOCK_N"
        is_edge = loop.zero_fill and self.fills_when == "ZERO_FILL"
        return f"tl.range({bounds}, num_stages=1)" if is_edge else f"range({bounds})"

    def queries_of(self, loop: Loop) -> str:
        if loop.listed is not None:
            return self._listed_tiles(loop.listed)
        return f"range({scalar(loop.start)}, {scalar(loop.stop)}, BLOCK_M)"

    def walks_by(self, loop: Loop) -> str:
        return "list_item" if loop.listed is not None else f"{self.kernel.regions.axis}_lo"

    def _listed_tiles(self, walk: ListWalk) -> str:
        if walk.gathers:
            return f"range(0, listed * {walk.block}, BLOCK_N)"
        return f"range(0, listed * ({walk.block} // {self._inner_tile}))"

    @property
    def gathers(self) -> bool:
        return any(loop.listed is not None and loop.listed.gathers for loop in self.kernel.regions.loops)

    @property
    def _inner_tile(self) -> str:
        return "BLOCK_N" if self.kernel.regions.axis == "kv" else "BLOCK_M"

    @property
    def find_list(self) -> list[str]:
        walk = next((loop.listed for loop in self.kernel.regions.loops if loop.listed is not None), None)
        if walk is None:
            return []
        at = f"tl.cast({scalar(walk.line)}, tl.int64) * ({scalar(walk.stride)})"
        return [
            f"list_row = _{walk.memory}_ptr + {at}",
            f"listed = _list_length(list_row, {scalar(walk.line)} >= 0)",
        ]

    def find_tile(self, loop: Loop) -> str:
        assert loop.listed is not None
        block, tile = loop.listed.block, self._inner_tile
        if loop.listed.gathers:
            return f"kv_idx = _find_keys(list_row + 1, list_item, listed * {block}, N, BLOCK_N, {block})"
        entry = f"_list_entry(list_row + 1 + list_item // ({block} // {tile}))"
        at = f"{self.kernel.regions.axis}_lo = {{}} * {block} + list_item % ({block} // {tile}) * {tile}"
        if not loop.listed.knows_full:
            return at.format(entry)
        return (
            f"list_entry = {entry}\n{at.format('list_entry // 2')}\n{HIDES_SOME.name} = list_entry % 2 != 0"
        )

    @property
    def list_pointers(self) -> list[str]:
        found = (loop.listed.memory for loop in self.kernel.regions.loops if loop.listed is not None)
        return [f"_{memory}_ptr" for memory in found]

    @property
    def fills_when(self) -> str:
        partial = [loop for loop in self.kernel.regions.loops if loop.masked is not False]
        if not any(loop.zero_fill for loop in partial):
            return ""
        if not all(loop.zero_fill for loop in partial):
            return "ZERO_FILL"
        return "MASKED" if all(loop.masked is True for loop in partial) else "True"

    @property
    def kept_rows(self) -> str:
        kept = self.kernel.step.kept
        assert kept is not None
        return transposed(kept)

    @property
    def keep_scale(self) -> str:
        assert self.kernel.softmax.dropout is not None
        p = scalar(self.kernel.softmax.dropout.p)
        return f"tl.where({p} < 1.0, 1.0 / (1.0 - {p}), 0.0)"

    @property
    def keep_drawn(self) -> str:
        """Which elements of a tile are kept."""
        drop = self.kernel.softmax.dropout
        assert drop is not None
        drawn = f"{scalar(drop.p)}, {scalar(drop.seed)}, b, {counter(drop.head)}"
        return f"_keep_dropout({drawn}, q_idx, kv_lo, BLOCK_M, BLOCK_N)"

    @property
    def keep_listed(self) -> str:
        """Which elements of a tile dropout keeps, where lists name its keys and its rows are heads."""
        dropout, lists = self.kernel.softmax.dropout, self.module.lists
        assert dropout is not None
        assert lists is not None
        head = scalar(dropout.head)
        heads = head if isinstance(dropout.head, Index | Ref) else f"({head}).to(tl.int32)"
        if isinstance(self.kernel, Forward) or self.kernel.pack is None:
            heads += " + tl.zeros([BLOCK_M], tl.int32)"
        in_a_row = self.kernel.structure == "decode" and not self.gathers
        keys = "kv_lo + tl.arange(0, BLOCK_N)" if in_a_row else "kv_idx"
        drawn = f"{scalar(dropout.p)}, {scalar(dropout.seed)}, b, {heads}, q_idx, {keys}"
        return f"_keep_listed({drawn}, BLOCK_M, BLOCK_N, {16 if lists.keys % 16 == 0 else 1})"


#: Tensors that are read or written in whole tiles.
MATRICES = {"q": "Q", "k": "K", "v": "V", "o": "O"}


class KernelText(ProgramText):
    """Text of one kernel; attribute by attribute what `templates/triton/forward_*.py.jinja` prints."""

    kernel: Forward | Decode
    form: FormText
    step_name = "_forward_step"

    def __init__(self, module: Module, kernel: Forward | Decode) -> None:
        attention = module.variant.attention
        self.module, self.kernel = module, kernel
        self.view = OutputView(module, kernel)
        self.d, self.dv = feature(attention.q), feature(attention.v)
        self.block_d, self.block_dv = block(self.d), value_columns(attention)
        self._columns = parts_of(module, kernel)
        self.padded = is_padded(module)
        self.may_lack_lse = any(arg.tensor.name == "lse" for arg in module.kept)
        self.two_pass = kernel.softmax.kind == "two_pass"
        self.uses_q_pos = any(Index("q_pos") in walk(expr) for expr in kernel.expressions)
        self.o_dtype = TL_DTYPES[kernel.bound.o_dtype]
        self.form = FORMS[kernel.softmax.form](kernel, self.is_ordered)
        self.precision = ', input_precision="tf32x3"' if attention.q.dtype is DType.F32 else ""

    # -- loads of tiles ------------------------------------------------------------------------------------

    @property
    def parts(self) -> list[PartText]:
        return [self._part(number) for number in range(len(self._columns))]

    @property
    def more_parts(self) -> list[PartText]:
        return self.parts[1:]

    def _part(self, number: int) -> PartText:
        part, suffix = self._columns[number], f"_{number + 1}" if number else ""
        load_k = self._load_kv("k", part.width, part.first)
        return PartText(q=f"q{suffix}", k=f"k{suffix}", load_q=self._load_part(part), load_k=load_k)

    def _load_part(self, part: DotPart) -> str:
        return self._load_rows("q", "h", "q_lo, M, stride_qm, BLOCK_M", part.width, part.first)

    @property
    def load_q(self) -> str:
        return self.parts[0].load_q

    @property
    def load_k(self) -> str:
        return self.parts[0].load_k

    @property
    def load_v(self) -> str:
        return "k" if self._shares_v else self._load_kv("v", self.dv)

    def scale_columns(self, name: str, tile: str, part: int = 0) -> list[str]:
        """Returns statements that multiply a tile of k or v by the scale of its columns; none where it has
        none. part: of the columns of k, the number.
        """
        scale = next((scale for scale in self.kernel.step.scales if scale.tensor == name), None)
        if scale is None or (name == "v" and self._shares_v):  # v is k then, which has been multiplied
            return []
        first, width = (self._columns[part].first, self._columns[part].width) if name == "k" else (0, self.dv)
        return scale_tile(tile, scale, first, block(width), TL_DTYPES[self.module.variant.attention.element])

    @property
    def _shares_v(self) -> bool:
        return self.view.rows("v").tensor == "k" and self._columns[0].width == self.dv

    def _load_kv(self, name: str, width: int, first: int = 0) -> str:
        attention = self.module.variant.attention
        stored = DType(attention.tensor(self.view.rows(name).tensor).dtype)
        load, widened = self._load_stored(name, width, first), widening(stored, widened_to(attention, name))
        return f"{widened}({load}, {self.stays(name)})" if widened else load

    def stays(self, name: str) -> str:
        """Says whether a tile of 8 bits becomes one of 16 in the threads that loaded it, as that of v does:
        what loads operands of tensor cores takes rows of bytes, as those of k are, but no columns. Where
        tensor cores read shared memory, tiles of 16 bits lie there anyway, and Triton's pipelines for some of
        them take no assembly that is not pure.
        """
        if name != ("k" if self._shares_v else "v") or self.kernel.grid.over == "head":
            return "False"
        return f"q.shape[0] < {FEWEST_FROM_SHARED}"

    def _load_stored(self, name: str, width: int, first: int) -> str:
        rows = self.view.rows(name)
        of = rows.tensor
        if not rows.page:
            return self._load_rows(of, self.view.kv_name, f"kv_lo, N, stride_{of}n, BLOCK_N", width, first)
        where = f"page, kv_lo, N, stride_{of}p, stride_{of}n"
        x = f"{MATRICES[of]} + {first}" if first else MATRICES[of]
        return f"_load_pages({x}, {where}, BLOCK_N, {rows.page}, {self._width(width)})"

    def _load_rows(self, of: str, head: str, what: str, width: int, first: int = 0) -> str:
        name = f"{MATRICES[of]} + {first}" if first else MATRICES[of]
        return (
            f"_load_rows({name}, b, {head}, {what}, {self._width(width)}, TMA)"
            if self.kernel.tma
            else f"_load_rows({name}, {what}, {self._width(width)})"
        )

    @property
    def find_pages(self) -> str:
        k = self.view.rows("k")
        if not k.page:
            return ""
        return f"_find_pages({k.table}, {k.table_stride}, kv_lo, N, BLOCK_N, {k.page})"

    def _width(self, size: int) -> str:
        columns = self.block_dv if size == self.dv else block(size)
        return f"{size}, {columns}" if self.padded else str(size)

    @property
    def matrices(self) -> list[str]:
        return [name for name in MATRICES if self.view.rows(name).tensor == name]

    @property
    def advance(self) -> list[str]:
        moves = ((name, self.offset(name)) for name in self.matrices)
        return [f"{MATRICES[name]} += {offset}" for name, offset in moves if offset]

    @property
    def lse_offset(self) -> str:
        return self.offset("lse")

    def offset(self, name: str) -> str:
        """Returns the offset from the first element to row 0 of the sequence and head at hand; in pages, to
        the head.
        """
        return offset(self.view.row_zero(name).terms)

    # -- parameters and arguments --------------------------------------------------------------------------

    @property
    def kernel_parameters(self) -> list[str]:
        return [", ".join(list_types(line)) for line in self.parameter_lines]

    @property
    def parameter_lines(self) -> list[list[str]]:
        tensors = [
            *(MATRICES[name] for name in self.matrices),
            *(f"{arg.tensor.name}_ptr" for arg in self._pointers()),
            *self.list_pointers,
        ]
        tensors_with_strides = (*self._args, *self.module.outputs, *self.module.kept)
        strides = [self.view.strides(arg) for arg in tensors_with_strides]
        if self.kernel.grid.over == "head":
            tensors += ["acc_ptr", "l_ptr", "m_ptr"]
        return [tensors, *(line for line in strides if line), self.size_names, self.tiles]

    @property
    def tiles(self) -> list[str]:
        return ["BLOCK_M", "BLOCK_N", *self.tma]

    @property
    def tma(self) -> list[str]:
        return ["TMA"] if self.kernel.tma else []

    @property
    def unspecialised(self) -> list[str]:
        lse = (arg for arg in self.module.outputs if arg.tensor.name == "lse")
        return [*self.size_names, *(name for arg in lse for name in self.view.strides(arg))]

    @property
    def tile_parameters(self) -> list[str]:
        return ["tile", *self.kernel_parameters]

    @property
    def tile_arguments(self) -> str:
        return ", ".join(["tile", *(name for line in self.parameter_lines for name in line)])

    def _pointers(self) -> Iterator[Arg]:
        everything = (*self.module.outputs, *self.module.kept, *self._args)
        yield from (arg for arg in everything if arg.tensor.name not in MATRICES)

    @property
    def _args(self) -> list[Arg]:
        made = self.module.lists
        if made is None:
            return [*self.module.taken]
        lists = {made.tensor, *([made.limit.tensor] if isinstance(made.limit, Load) else [])}
        statements = (*self.kernel.program, *self.kernel.outer, *self.kernel.regions.statements)
        step = (*self.kernel.step.fetches, *self.kernel.step.masked_fetches)
        read = {item.load.tensor for item in (*statements, *step) if isinstance(item, Fetch)}
        return [arg for arg in self.module.taken if arg.tensor.name not in lists - read]

    @property
    def step_names(self) -> list[str]:
        own: list[str]
        if self.kernel.grid.over == "q":
            carried = self.form.carried
            own = [*carried, *self._q_names, *self._key_names("k" if self.two_pass else "kv")]
            if not self.two_pass:
                own.insert(0, "acc")
            return unique((*own, *self.kernel.step.names))
        own = ["q_lo", "k", "v", "Q", "o_rows", "l_rows", "m_rows", "b", "h", "kv_lo", "M", "N", "stride_qm"]
        if any(fetch.axes == ("kv",) for fetch in self.kernel.outer):
            own.append("kv_idx")
        names = (name for name in self.kernel.step.names if name not in ("q_idx", "q_pos"))
        return unique((*own, *names))

    @property
    def apply_names(self) -> list[str]:
        return unique(("acc", "shift", *self._q_names, *self._key_names("kv"), *self.kernel.step.names))

    @property
    def _q_names(self) -> list[str]:
        return [part.q for part in self.parts]

    def _key_names(self, names: str) -> list[str]:
        of = unique(self.view.rows(name).tensor for name in names)
        rows = self.view.rows("k")
        where = ["b", self.view.kv_name] if self.kernel.tma else []
        table = [rows.table, rows.table_stride] if rows.page else []
        strides = [f"stride_{name}{axis}" for name in of for axis in ("pn" if rows.page else "n")]
        return [*(MATRICES[name] for name in of), *table, *where, "kv_lo", "N", *strides]

    @property
    def step_parameters(self) -> str:
        return ", ".join(list_types((*self.step_names, *self._step_constants())))

    @property
    def apply_parameters(self) -> str:
        return ", ".join(list_types((*self.apply_names, *self._step_constants())))

    def step_arguments(self, loop: Loop) -> str:
        return ", ".join((*self.step_names, *self._step_values(loop)))

    def apply_arguments(self, loop: Loop) -> str:
        return ", ".join((*self.apply_names, *self._step_values(loop)))

    @property
    def branches(self) -> bool:
        return any(not isinstance(loop.masked, bool) for loop in self.kernel.regions.loops)

    @property
    def masked(self) -> str:
        return "partial" if self.branches else "MASKED"

    def _step_constants(self) -> list[str]:
        masked = [self.masked, *(["ZERO_FILL"] if self.fills_when == "ZERO_FILL" else [])]
        return [*masked, *(["BLOCK_M"] if self._step_needs_block_m() else []), "BLOCK_N", *self.tma]

    def _step_values(self, loop: Loop) -> list[str]:
        partial = str(loop.masked) if isinstance(loop.masked, bool) else scalar(loop.masked)
        values = {self.masked: partial, "ZERO_FILL": str(loop.zero_fill)}
        return [f"{name}={values.get(name, name)}" for name in self._step_constants()]

    def _step_needs_block_m(self) -> bool:
        return self.kernel.grid.over == "head" or self.kernel.softmax.dropout is not None

    @property
    def step_result(self) -> str:
        return ", ".join([*([] if self.two_pass else ["acc"]), *self.form.carried])

    # -- single expressions --------------------------------------------------------------------------------

    @property
    def all_tiles(self) -> str:
        tiles = self.tile_count if self.kernel.grid.sequences is None else f"({self.tile_count})"
        return f"{tiles} * {self.all_heads}"

    @property
    def tile_in_sequence(self) -> str:
        forwards = "(tile - first // BLOCK_M - b)"
        return "(end // BLOCK_M + b - tile)" if self.kernel.grid.longest_first else forwards

    @property
    def persistent_note(self) -> str:
        return ", tile after tile: one program per SM" if self.kernel.grid.persistent else ""

    @property
    def v_scale(self) -> str:
        factor = self.kernel.softmax.v_scale
        return "" if factor is None else tiled(Binary("*", Ref("o", "float", ("q", "kv")), factor))

    @property
    def drop(self) -> list[str]:
        if self.kernel.softmax.dropout is None:
            return []
        keep = self.keep_listed if isinstance(self.kernel, Decode) else self.keep_drawn
        return [f"p = tl.where({keep}, p, 0.0)"]

    @property
    def fill_v(self) -> list[str]:
        why = "# No query keeps these keys: their p is 0, but 0 * NaN is NaN."
        return [why, f"v = tl.where({self.kept_rows}, v, 0.0)"]

    @property
    def fill_partial_v(self) -> list[str]:
        """The same lines, in the tiles that have such keys."""
        when = self.fills_when
        return under(when, self.fill_v) if when not in ("", "True") else self.fill_v if when else []

    @property
    def scaled_o(self) -> list[str]:
        """Lines that multiply o by what dropout and the scale of v have left to the end."""
        kept = [f"o = o * {self.keep_scale}"] if self.kernel.softmax.dropout is not None else []
        return [*kept, *([f"o = {self.v_scale}"] if self.v_scale else [])]

    @property
    def scaled_p(self) -> str:
        assert self.kernel.step.v_scale is not None
        return tiled(Binary("*", Ref("p", "float", ("q", "kv")), self.kernel.step.v_scale))

    @property
    def store_attention(self) -> list[str]:
        """The rows that the backward reads: past the end of a sequence these are zeros, as those of o."""
        if all(arg.tensor.name != "attention" for arg in self.module.kept):
            return []
        tma, is_cut = self.kernel.tma, self.stored != "M"
        at = f"attention_ptr + {self.offset('attention')}"
        rows = "tl.where((q_idx < M)[:, None], o, 0.0)" if is_cut else "o"
        store = (
            f"_store_rows({at}, {'b, h, ' if tma else ''}q_lo, {self.stored}, stride_attentionm, "
            f"{rows}.to({self.o_dtype}), BLOCK_M, {self._width(self.dv)}{', TMA=False' if tma else ''})"
        )
        return under("attention_ptr is not None", [store])

    @property
    def reads_column(self) -> bool:
        epilogue = self.kernel.epilogue
        return epilogue is not None and any(Index(COLUMN) in walk(x) for x in epilogue.expressions)

    @property
    def row_mask(self) -> str:
        return "row[:, None]" + ("" if self.dv == self.block_dv else f" & (d[None, :] < {self.dv})")

    @property
    def store_o(self) -> str:
        return (
            f"_store_rows(O, {'b, h, ' if self.kernel.tma else ''}q_lo, {self.stored}, stride_om, "
            f"o.to({self.o_dtype}), BLOCK_M, {self._width(self.dv)}{', TMA' if self.kernel.tma else ''})"
        )

    @property
    def stored(self) -> str:
        return scalar(self.kernel.stored)

    # -- segments ------------------------------------------------------------------------------------------

    @property
    def is_ordered(self) -> bool:
        return self.module.variant.attention.segment is not None

    @property
    def first_segment(self) -> str:
        segments = self._segments
        lo, size = scalar(segments.lo), segments.size
        return "0" if segments.lo == ZERO else f"{lo} // {size} * {size}"

    @property
    def segment_lo(self) -> str:
        lo = self._segments.lo
        return "segment" if lo == ZERO else f"tl.maximum(segment, {scalar(lo)})"

    @property
    def loops(self) -> tuple[Loop, ...]:
        lo, hi = Ref("segment_lo", "int", natural=True), Ref("segment_hi", "int")
        loops = self.kernel.regions
        return (within(loops, lo, hi) if self.is_ordered else loops).loops

    @property
    def segments(self) -> Segments | None:
        return self.kernel.segments if isinstance(self.kernel, Forward) else None

    @property
    def _segments(self) -> Segments:
        assert self.segments is not None
        return self.segments
