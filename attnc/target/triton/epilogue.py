"""Text of the kernel that carries the gradient of o through an epilogue: what
`templates/triton/backward_epilogue.py.jinja` prints.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.construct import conj
from attnc.expr.nodes import COLUMN, FALSE, TRUE, Binary, Compare, Const, Expr, Index, Ref, show, walk
from attnc.model.dtypes import DType
from attnc.plan.ir import Module
from attnc.plan.ir.backward import Adjoint, EpilogueGradient
from attnc.plan.signature import block
from attnc.plan.steps import tensors_of
from attnc.target.declaration import CallText
from attnc.target.printer import IN_ROWS
from attnc.target.triton.launch import triton_kernel
from attnc.target.triton.parameters import Pair, TritonTensors, declare_rows_kernel
from attnc.target.triton.printer import TL_DTYPES, address, scalar, tiled

#: Warps of a program: its tile has as many rows as that of a kernel with two products, and no product.
_WARPS = 8


class EpilogueText:
    """Attribute by attribute what the template prints. config: what a declaration calls the one of the kernel
    whose rows a program has.
    """

    def __init__(self, module: Module, planned: EpilogueGradient, config: str) -> None:
        self.module, self.planned, self.config = module, planned, config
        self.tma = module.kernel.tma  # what the module's functions take
        self.tensors = TritonTensors(module)
        self.block_dv = block(self.tensors.columns_of_o)
        self.uses_q_pos = any(Index("q_pos") in walk(expr) for expr in planned.expressions)
        self.uses_d = (
            self.tensors.dv != self.block_dv
            or any(COLUMN in adjoint.along for adjoint in planned.adjoints)
            or any(Index(COLUMN) in walk(expr) for expr in planned.expressions)
        )

    # -- which tile is a program's

    @property
    def _is_packed(self) -> bool:
        return self.planned.sequences is not None

    @property
    def find_tile(self) -> Iterator[str]:
        sequences = self.planned.sequences
        if sequences is None:
            yield "q_tiles = M_padded // BLOCK_M"
            yield "b = tl.program_id(0) // q_tiles // H"
            yield "h = tl.program_id(0) // q_tiles % H"
            yield "q_lo = tl.program_id(0) % q_tiles * BLOCK_M"
            return
        cu, rows = sequences.cu_seqlens, scalar(sequences.rows)
        yield f"q_tiles = {rows} // BLOCK_M + B + 1"
        yield "h = tl.program_id(0) // q_tiles"
        found = f"_find_sequence({cu}_ptr, stride_{cu}_0, tl.program_id(0) % q_tiles, B, {rows}, BLOCK_M)"
        yield f"b, q_first, q_rows, q_lo = {found}"
        yield "M = tl.where(b < B, q_rows, 0)"
        yield "b = tl.minimum(b, B - 1)"

    @property
    def _grid(self) -> str:
        sequences = self.planned.sequences
        if sequences is None:
            return "M_padded // BLOCK_M * B * H"
        return f"({show(sequences.rows)} // BLOCK_M + B + 1) * H"

    def offset(self, name: str) -> str:
        return self.tensors.offset(name, "h")

    # -- tiles

    def _rows(self, function: str, name: str, stop: str, tile: str = "") -> str:
        width = self.tensors.width("o")
        where, tma = ("b, h, ", ", TMA=False") if self.tma else ("", "")
        given = f"{tile}, " if tile else ""
        return (
            f"{function}({name.upper()}, {where}q_lo, {stop}, stride_{name}m, {given}BLOCK_M, {width}{tma})"
        )

    @property
    def load_o(self) -> str:
        return self._rows("_load_rows", "o", "M")

    @property
    def load_dresult(self) -> str:
        return self._rows("_load_rows", "dresult", "M")

    @property
    def store_do(self) -> str:
        dtype = TL_DTYPES[DType(self.tensors.by_name["o"].dtype)]
        return self._rows("_store_rows", "do", scalar(self.planned.stored), f"do.to({dtype})")

    @property
    def inside(self) -> str:
        rows = "(q_idx < M)[:, None]"
        if self.tensors.dv == self.block_dv:
            return rows
        return f"{rows} & (d < {self.tensors.dv})[None, :]"

    @property
    def slope(self) -> str:
        return self._factor(self.planned.slope)

    def _factor(self, value: Expr) -> str:
        return tiled(Binary("*", Ref("x", "float", ("q", "kv")), value)).removeprefix("x * ")

    # -- gradients of what the epilogue loads

    @property
    def and_the_rest(self) -> str:
        names = [*dict.fromkeys(f"d{adjoint.load.tensor}" for adjoint in self.planned.adjoints)]
        last = f" and {names[-1]}" if names else ""
        return "".join(f", {name}" for name in names[:-1]) + last

    @property
    def sums(self) -> Iterator[str]:
        for adjoint in self.planned.adjoints:
            if adjoint.accumulate == "atomic" and adjoint.guard == FALSE:
                continue
            term = f"tl.where(inside, dresult * {self._factor(adjoint.value)}, 0.0)"
            if adjoint.value == Const(1.0):
                term = "tl.where(inside, dresult, 0.0)"
            yield self._atomic(adjoint, term) if adjoint.accumulate == "atomic" else self._own(adjoint, term)

    def _own(self, adjoint: Adjoint, term: str) -> str:
        at, dv = f"{adjoint.name}_ptr", self.tensors.dv
        head = "(b * H + h).to(tl.int64)"
        tile = f"{head} * q_tiles + q_lo // BLOCK_M"
        row = f"{head} * M_padded + q_idx"
        match adjoint.along:
            case ("q", "d"):
                where = f"{at} + ({row})[:, None] * {dv} + d[None, :]"
                return f"tl.store({where}, {term}.to({at}.dtype.element_ty), mask=inside)"
            case ("tile", "d"):
                return f"tl.store({at} + ({tile}) * {dv} + d, tl.sum({term}, 0), mask=d < {dv})"
            case ("q",):
                return f"tl.store({at} + {row}, tl.sum({term}, 1), mask=q_idx < M)"
            case _:
                return f"tl.store({at} + {tile}, tl.sum(tl.sum({term}, 1), 0))"

    def _atomic(self, adjoint: Adjoint, term: str) -> str:
        in_columns = Compare("<", Index(COLUMN), Const(self.tensors.dv))
        match adjoint.along:
            case ("q", "d"):
                printer, value, inside = tiled, term, "inside"
                guard = "" if adjoint.guard == TRUE else f" & ({tiled(adjoint.guard)})"
                where = f"{inside}{guard}"
            case ("tile", "d"):
                printer, value = scalar, f"tl.sum({term}, 0)"
                where = scalar(conj(in_columns, adjoint.guard))
            case ("q",):
                printer, value, where = scalar, f"tl.sum({term}, 1)", scalar(conj(IN_ROWS, adjoint.guard))
            case _:
                printer, value = scalar, f"tl.sum(tl.sum({term}, 1), 0)"
                where = "" if adjoint.guard == TRUE else scalar(adjoint.guard)
        at = address(f"{adjoint.name}_ptr", adjoint.name, adjoint.load.indices, printer)
        mask = f", mask={where}" if where else ""
        return f'tl.atomic_add({at}, {value}{mask}, sem="relaxed")'

    # -- parameters and arguments

    @property
    def _own_tensors(self) -> list[Pair]:
        return [(name.upper(), name) for name in ("o", "dresult", "do")]

    @property
    def _pointers(self) -> list[Pair]:
        names = [*self._loaded, *(adjoint.name for adjoint in self.planned.adjoints)]
        return [(f"{name}_ptr", name) for name in names]

    @property
    def _loaded(self) -> list[str]:
        planned = self.planned
        read = tensors_of((*planned.program, *planned.rows, *planned.fetches))
        read |= set() if planned.sequences is None else {planned.sequences.cu_seqlens}
        return [arg.tensor.name for arg in self.module.args if arg.tensor.name in read]

    @property
    def lines(self) -> list[list[str]]:
        strides = [self.tensors.strides(name) for _, name in self._own_tensors]
        strides += [self.tensors.extra_strides(name, name) for name in self._loaded]
        strides += [
            self.tensors.extra_strides(adjoint.name, adjoint.load.tensor)
            for adjoint in self.planned.adjoints
            if adjoint.accumulate == "atomic"
        ]
        pointers = [name for name, _ in (*self._own_tensors, *self._pointers)]
        return [pointers, *(line for line in strides if line), self.sizes]

    @property
    def sizes(self) -> list[str]:
        return [*self.planned.dims, *([] if self._is_packed else ["M_padded"])]

    @property
    def kernel_parameters(self) -> list[str]:
        return declare_rows_kernel(self.lines)

    @property
    def launch(self) -> CallText:
        return triton_kernel(
            self.planned.name,
            self._grid,
            pointers=[tensor for _, tensor in (*self._own_tensors, *self._pointers)],
            config=self.config,
            warps=_WARPS,
        )
