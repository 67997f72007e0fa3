"""The pieces of the text of a Triton kernel that computes o: parameter lists, offsets, tile loads."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.construct import ZERO
from attnc.expr.nodes import COLUMN, Binary, Index, Load, Ref, walk
from attnc.model.dtypes import DType
from attnc.plan.ir import Arg, Decode, Fetch, Forward, Loop, Module
from attnc.plan.ir.kernel import DotPart, Segments
from attnc.plan.regions import within
from attnc.plan.signature import block, feature, value_columns
from attnc.plan.triton.resources import FEWEST_FROM_SHARED
from attnc.target.kernel_view import OutputView, parts_of
from attnc.target.triton.columns import PartText, is_padded, scale_tile, widened_to
from attnc.target.triton.forms import FORMS, FormText
from attnc.target.triton.printer import (
    TL_DTYPES,
    list_types,
    offset,
    scalar,
    tiled,
    under,
    unique,
    widening,
)
from attnc.target.triton.program import ProgramText

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
