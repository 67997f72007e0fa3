"""Text of the kernel that carries the gradient of o through an epilogue: what
`templates/cuda/backward_epilogue.cu.jinja` prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnc.expr.construct import conj
from attnc.expr.nodes import FALSE, TRUE, Binary, Const, Ref
from attnc.model.dtypes import DType
from attnc.plan.ir import Let, Module, Statement
from attnc.plan.ir.backward import Adjoint, EpilogueGradient
from attnc.target.printer import IN_ROWS
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward import ROWS_WARPS, CudaFileText, default_of
from attnc.target.sm80.printer import CudaWalk, address, scalar, sizes_of_call, statement


class CudaEpilogueText(CudaFileText):
    """Attribute by attribute what the template prints. A sum of a row is shared by eight threads, one of a
    column by all that have it, in shared memory, and one of the tile by all.
    """

    numbers = ()

    def __init__(self, module: Module, arguments: ArgumentText, planned: EpilogueGradient) -> None:
        assert module.backward is not None
        first = default_of(module.backward.kernels[0])
        super().__init__(module, arguments, planned.name, replace(first, warps=ROWS_WARPS, stages=1))
        self.planned = planned
        self.rows, self.fetches = planned.rows, planned.fetches
        self.stored = scalar(planned.stored)
        self.width = f"DV = {self.layout.dv}"
        self.slope = scalar(planned.slope)
        self._adjoints = [a for a in planned.adjoints if not (a.accumulate == "atomic" and a.guard == FALSE)]
        self._columns = [a.name for a in self._adjoints if a.along == ("tile", "d")]
        self.sums_columns = len(self._columns)
        self.sums_tile = any(not a.along for a in self._adjoints)

    def statement(self, item: Statement) -> str:
        return statement(item, self.dtypes, self.planned.dims, scalar)

    @property
    def sizes(self) -> Iterator[str]:
        shortened = {item.name for item in self.planned.program}
        yield from sizes_of_call(name for name in self.planned.dims if name not in shortened)
        yield from sizes_of_call((name for name in self.planned.dims if name in shortened), "int")

    @property
    def program(self) -> Iterator[str]:
        packed = ["M"] if self.planned.sequences is not None else []
        declared = {*self.planned.dims, *packed}
        for item in self.planned.program:
            if isinstance(item, Let) and item.name in ("M", "N") and item.name not in declared:
                declared.add(item.name)
                yield f"int {item.name} = {scalar(item.value)};"
            else:
                yield statement(item, self.dtypes, tuple(declared), scalar)

    @property
    def place(self) -> Iterator[str]:
        sequences = self.planned.sequences
        if sequences is None:
            yield "const int q_tiles = args.M_padded / BLOCK_M;"
            yield "const int h = blockIdx.x / q_tiles % H, b = blockIdx.x / q_tiles / H;"
            yield "const int q_lo = blockIdx.x % q_tiles * BLOCK_M;"
            return
        yield f"const int q_tiles = {self._tiles('args.')};"
        yield "const int h = blockIdx.x / q_tiles, number = blockIdx.x % q_tiles;"
        walk = replace(self.planned.walk, writes_all_rows=True)
        yield from CudaWalk(walk=walk, of_call="args.").find_sequence(sequences, "BLOCK_M")

    def _tiles(self, of_call: str) -> str:
        sequences = self.planned.sequences
        assert sequences is not None
        return f"{of_call}{scalar(sequences.rows)} / BLOCK_M + {of_call}B + 1"

    @property
    def and_the_rest(self) -> str:
        names = [*dict.fromkeys(f"d{adjoint.load.tensor}" for adjoint in self.planned.adjoints)]
        last = f" and {names[-1]}" if names else ""
        return "".join(f", {name}" for name in names[:-1]) + last

    # -- gradients of what the epilogue loads

    def _term(self, adjoint: Adjoint) -> str:
        product = Binary("*", Ref("dresult", "float"), adjoint.value)
        return scalar(Ref("dresult", "float") if adjoint.value == Const(1.0) else product)

    @property
    def starts(self) -> Iterator[str]:
        yield from (f"float {a.name} = 0.0f;" for a in self._adjoints if not a.along)

    @property
    def row_starts(self) -> Iterator[str]:
        yield from (f"float {a.name} = 0.0f;" for a in self._adjoints if a.along == ("q",))

    @property
    def terms(self) -> Iterator[str]:
        for adjoint in self._adjoints:
            term = f"inside ? {self._term(adjoint)} : 0.0f"
            match adjoint.along:
                case ("q", "d") if adjoint.accumulate == "two_pass":
                    at = "((long long)(b * H + h) * args.M_padded + q_idx) * DV + d"
                    made = f"args.{adjoint.name}_ptr[{at}]"
                    is_wide = self.arguments.adjoint_dtype(adjoint) is DType.F32
                    value = self._term(adjoint) if is_wide else self.elements.rounded(self._term(adjoint))
                    yield "if (inside)"
                    yield f"    {made} = {value};"
                case ("q", "d"):
                    yield f"if ({scalar(conj(IN_ROWS, adjoint.guard))})"
                    yield f"    atomic_add(&{self._at(adjoint)}, {self._term(adjoint)});"
                case ("tile", "d"):
                    yield f"{self._column(adjoint, 'threadIdx.x / 8')} += {term};"
                case _:
                    yield f"{adjoint.name} += {term};"

    @property
    def row_ends(self) -> Iterator[str]:
        for adjoint in self._adjoints:
            if adjoint.along != ("q",):
                continue
            name = adjoint.name
            yield from (f"{name} += shuffle_xor({name}, {lane});" for lane in (1, 2, 4))
            if adjoint.accumulate == "two_pass":
                yield "if (threadIdx.x % 8 == 0 && inside)"
                yield f"    args.{name}_ptr[(long long)(b * H + h) * args.M_padded + q_idx] = {name};"
            else:
                yield f"if (threadIdx.x % 8 == 0 && {scalar(conj(IN_ROWS, adjoint.guard))})"
                yield f"    atomic_add(&{self._at(adjoint)}, {name});"

    @property
    def ends(self) -> Iterator[str]:
        if self._columns:
            yield "__syncthreads();"
            yield "for (int d = threadIdx.x; d < DV; d += THREADS) {"
            for adjoint in self._adjoints:
                if adjoint.along == ("tile", "d"):
                    yield f"    float {adjoint.name} = 0.0f;"
                    yield "    for (int i = 0; i < THREADS / 8; ++i)"
                    yield f"        {adjoint.name} += {self._column(adjoint, 'i')};"
            for adjoint in self._adjoints:
                if adjoint.along != ("tile", "d"):
                    continue
                value = adjoint.name
                if adjoint.accumulate == "two_pass":
                    yield f"    args.{adjoint.name}_ptr[(long long)blockIdx.x * DV + d] = {value};"
                    continue
                guard = "" if adjoint.guard == TRUE else f"if ({scalar(adjoint.guard)}) "
                yield f"    {guard}atomic_add(&{self._at(adjoint)}, {value});"
            yield "}"
            yield "__syncthreads();"
        for adjoint in self._adjoints:
            if adjoint.along:
                continue
            yield f"{adjoint.name} = block_sum({adjoint.name}, (float*)shared);"
            yield f"if (threadIdx.x == 0{'' if adjoint.guard == TRUE else f' && ({scalar(adjoint.guard)})'})"
            if adjoint.accumulate == "two_pass":
                yield f"    args.{adjoint.name}_ptr[blockIdx.x] = {adjoint.name};"
            else:
                yield f"    atomic_add(&{self._at(adjoint)}, {adjoint.name});"

    def _column(self, adjoint: Adjoint, group: str) -> str:
        first = f"{self._columns.index(adjoint.name)} * (THREADS / 8)"
        return f"columns[({first} + {group}) * DV + d]"

    def _at(self, adjoint: Adjoint) -> str:
        return address(f"args.{adjoint.name}_ptr", adjoint.name, adjoint.load.indices, scalar)
