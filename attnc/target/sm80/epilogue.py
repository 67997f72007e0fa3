"""Text of the kernel that carries the gradient of o through an epilogue: what
`templates/cuda/backward_epilogue.cu.jinja` prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from attnc.expr.construct import conj
from attnc.expr.nodes import FALSE, TRUE, Binary, Const, Ref
from attnc.model.dtypes import DType
from attnc.plan.epilogue import is_row
from attnc.plan.ir import Fetch, Let, Module, Statement
from attnc.plan.ir.backward import Adjoint, EpilogueGradient
from attnc.plan.steps import fetches_for
from attnc.target.printer import IN_ROWS
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward import ROWS_WARPS, CudaFileText, default_of
from attnc.target.sm80.printer import CudaWalk, address, local, scalar, sizes_of_call, statement, stored_type


class CudaEpilogueText(CudaFileText):
    """Attribute by attribute what the template prints. A sum of a row is shared by eight threads, one of a
    column by all that have it, in shared memory, and one of the tile by all. Rows of 16 bits whose columns
    are read in their order come 16 bytes at a time, beside elements of 16 bits.
    """

    numbers = ()
    _chunked: Mapping[str, Fetch] = {}

    def __init__(self, module: Module, arguments: ArgumentText, planned: EpilogueGradient) -> None:
        assert module.backward is not None
        first = default_of(module.backward.kernels[0])
        super().__init__(module, arguments, planned.name, replace(first, warps=ROWS_WARPS, stages=1))
        self.planned = planned
        self.rows, self.fetches = planned.rows, planned.fetches
        if not self.layout.is_f32:
            self._chunked = {x.name: x for x in planned.fetches if is_row(x, self.dtypes[x.load.tensor])}
        self.stored = scalar(planned.stored)
        self.width = f"DV = {self.layout.dv}"
        self.slope = scalar(planned.slope)
        self._adjoints = [a for a in planned.adjoints if not (a.accumulate == "atomic" and a.guard == FALSE)]
        self._columns = [a.name for a in self._adjoints if a.along == ("tile", "d")]
        self.sums_columns = len(self._columns)
        self.sums_tile = any(not a.along for a in self._adjoints)

    def statement(self, item: Statement) -> str:
        if isinstance(item, Fetch) and item.name in self._chunked:
            return local("const float", {item.name: f"to_float({item.name}_columns[c])"})
        return statement(item, self.dtypes, self.planned.dims, scalar)

    @property
    def columns(self) -> Iterator[str]:
        """What is loaded of rows before elements are computed."""
        for name, fetch in self._chunked.items():
            load, row = fetch.load, fetch.row
            kind = stored_type(self.dtypes[load.tensor], self.module.variant)
            base, done = (f"args.{load.tensor}_ptr", 0) if row is None else (row.name, len(row.indices))
            columns = (*load.indices[:-1], Ref("first", "int"))
            at = address(base, load.tensor, columns, scalar, done=done)
            stride = f"args.stride_{load.tensor}_{len(load.indices) - 1}"
            yield f"alignas(16) {kind} {name}_columns[COLUMNS] = {{}};"
            if fetch.guard != TRUE:
                yield f"if ({scalar(fetch.guard)})"
            yield f"{'    ' * (fetch.guard != TRUE)}load_columns({name}_columns, &{at}, {stride});"
        for adjoint in self._kept_whole:
            yield f"alignas(16) {self._stored(adjoint)} {adjoint.name}[COLUMNS];"

    @property
    def stores(self) -> Iterator[str]:
        for adjoint in self._kept_whole:
            at = "((long long)(b * H + h) * args.M_padded + q_idx) * DV + first"
            yield "if (inside)"
            yield f"    store_columns(&args.{adjoint.name}_ptr[{at}], {adjoint.name});"

    @property
    def _kept_whole(self) -> list[Adjoint]:
        return [a for a in self._adjoints if a.along == ("q", "d") and a.accumulate == "two_pass"]

    def _stored(self, adjoint: Adjoint) -> str:
        return "float" if self.arguments.adjoint_dtype(adjoint) is DType.F32 else "element"

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
                    is_wide = self._stored(adjoint) == "float"
                    value = self._term(adjoint) if is_wide else self.elements.rounded(self._term(adjoint))
                    yield f"{adjoint.name}[c] = {value};"
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
            yield from (f"    {item}" for item in self._indices_of_columns)
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

    @property
    def _indices_of_columns(self) -> Iterator[str]:
        """What says where sums of columns go, which rows have loaded for themselves."""
        added = [a for a in self._adjoints if a.along == ("tile", "d") and a.accumulate == "atomic"]
        read = (expr for adjoint in added for expr in (*adjoint.load.indices, adjoint.guard))
        for item in fetches_for(self.fetches, *read):
            yield statement(item, self.dtypes, self.planned.dims, scalar)

    def _column(self, adjoint: Adjoint, group: str) -> str:
        first = f"{self._columns.index(adjoint.name)} * (THREADS / 8)"
        return f"columns[({first} + {group}) * DV + d]"

    def _at(self, adjoint: Adjoint) -> str:
        return address(f"args.{adjoint.name}_ptr", adjoint.name, adjoint.load.indices, scalar)
