"""Parameters of a backward kernel and the declaration of its launch: one list, so that they agree; and the
text of what the first kernel makes of each row: delta, base-2 lse, the gradient of the sink.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from attnc.expr.nodes import FALSE, TRUE, Const, show
from attnc.model.dtypes import DType
from attnc.model.tensors import Role
from attnc.plan.ir import Module, Statement
from attnc.plan.ir.backward import Adjoint, BackwardKernel, Preprocess, Prologue
from attnc.plan.signature import block, longest, stride_name
from attnc.plan.steps import tensors_of
from attnc.target.declaration import CallText, section
from attnc.target.kernel_view import Tensors, parts_of
from attnc.target.triton.columns import is_padded
from attnc.target.triton.launch import triton_kernel
from attnc.target.triton.printer import address, list_types, offset, scalar, under
from attnc.target.triton.sticks import SticksText

#: A kernel's parameter and the tensor that is passed for it.
Pair: TypeAlias = tuple[str, str]


class TritonTensors(Tensors):
    """The tensors of one module as its backward sees them."""

    def __init__(self, module: Module, planned: BackwardKernel | None = None) -> None:
        super().__init__(module)
        self.padded = is_padded(module)
        assert module.backward is not None
        first = planned or module.backward.kernels[0]
        self.parts = parts_of(module, first)
        #: Columns of a tile of o and do: those of the keys that are values, where keys are.
        self.columns_of_o = self.parts[0].width if first.v_in_k else self.dv

    def width(self, name: str) -> str:
        size = self.size(name)
        columns = block(self.columns_of_o if name in ("o", "do") else size)
        return f"{size}, {columns}" if self.padded else str(size)

    def offset(self, name: str, head: str) -> str:
        """Returns the offset from the first element to the rows of one head, of the sequence at hand."""
        return offset(self.row_zero(name, head).terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrologueText:
    """The prologue of a kernel that owns q tiles. masks_rows: there is no room for rows that are none;
    is_alone: the kernel does nothing else, and has rows past a sequence's length too.
    """

    module: Module
    prologue: Prologue
    tensors: TritonTensors
    masks_rows: bool = False
    is_alone: bool = False

    @property
    def forget_ends(self) -> list[str]:
        """The line that takes delta from rows past a length, of which do may be anything."""
        if not self.is_alone or "M" not in self.module.variant.attention.lengths:
            return []
        line = 'delta = tl.where(lse == -float("inf"), 0.0, delta)'
        return [f"{line}  # past a length do may be NaN, which 0 times is too"]

    @property
    def has_dlse(self) -> bool:
        return self.module.variant.attention.lse is not None

    @property
    def pointers(self) -> list[Pair]:
        return [("lse_ptr", "lse"), *([("dlse_ptr", "dlse")] if self.has_dlse else [])]

    @property
    def strides(self) -> list[list[str]]:
        return [self.tensors.strides(name) for name in ("lse", *(["dlse"] if self.has_dlse else []))]

    @property
    def in_rows(self) -> str:
        """Behind a packed sequence are the rows of the next; else there is room for whole tiles."""
        return ", mask=q_idx < M" if self.masks_rows or self.tensors.packs(Role.QUERY) else ""

    @property
    def subtract_dlse(self) -> list[str]:
        if not self.has_dlse:
            return []
        load = f"tl.load(dlse_head + {self.row('dlse')}, mask=q_idx < M, other=0.0)"
        lines = [f"dlse_head = dlse_ptr + {self.offset('dlse')}", f"delta -= {load}"]
        return under("dlse_ptr is not None", lines)

    @property
    def stores(self) -> list[str]:
        """Lines that write lse2 and delta for other kernels, if there are some."""
        names = ("lse2", "delta") if self.prologue.stored else ()
        return [f"tl.store({name}_ptr + first_row + q_idx, {name}{self.in_rows})" for name in names]

    def offset(self, name: str) -> str:
        """Returns the offset from the first element of lse, or of its gradient, to those of this head."""
        return self.tensors.offset(name, "h")

    def row(self, name: str) -> str:
        tensor = self.tensors.by_name[name]
        axis = tensor.axis(Role.QUERY)
        return "0" if axis is None else f"q_idx.to(tl.int64) * {stride_name(tensor, axis)}"

    @property
    def sink(self) -> str:
        assert self.prologue.sink is not None
        return scalar(self.prologue.sink)

    @property
    def sink_ends(self) -> Iterator[str]:
        for adjoint in self.prologue.adjoints:
            value = "dsink_row" if adjoint.value == Const(1.0) else f"dsink_row * ({scalar(adjoint.value)})"
            if adjoint.accumulate == "two_pass":
                at = f"{adjoint.name}_ptr + (b * H + h).to(tl.int64) * q_tiles + q_lo // BLOCK_M"
                yield f"tl.store({at}, {value})"
            elif adjoint.guard != FALSE:
                at = address(f"{adjoint.name}_ptr", adjoint.name, adjoint.load.indices, scalar)
                guard = "" if adjoint.guard == TRUE else f", mask={scalar(adjoint.guard)}"
                yield f'tl.atomic_add({at}, {value}{guard}, sem="relaxed")'


class PreprocessText:
    """Text of a kernel of its own for the rows: what `templates/triton/backward_preprocess.py.jinja` prints.

    config: the host's variable with the tiles of the kernel that reads the rows.
    """

    def __init__(self, module: Module, planned: Preprocess, config: str) -> None:
        self.module, self.planned = module, planned
        self.config = config
        self.tma = module.kernel.tma  # what the module's functions take
        self.tensors = TritonTensors(module)
        self.prologue = PrologueText(
            module=module, prologue=planned.prologue, tensors=self.tensors, is_alone=True
        )

    @property
    def program(self) -> tuple[Statement, ...]:
        return self.planned.program

    def offset(self, name: str) -> str:
        return self.tensors.offset(name, "h")

    @property
    def load_o(self) -> str:
        return self._tile("o")

    @property
    def load_do(self) -> str:
        return self._tile("do")

    def _tile(self, name: str) -> str:
        width = self.tensors.width(name)
        where, tma = ("b, h, ", ", TMA=False") if self.tma else ("", "")
        return f"_load_rows({name.upper()}, {where}q_lo, M, stride_{name}m, BLOCK_M, {width}{tma})"

    @property
    def lines(self) -> list[list[str]]:
        adjoints = self.planned.prologue.adjoints
        strides = [self.tensors.strides("o"), self.tensors.strides("do"), *self.prologue.strides]
        strides += [self.tensors.extra_strides(name, name) for name in self._sunk]
        strides += [
            self.tensors.extra_strides(a.name, a.load.tensor) for a in adjoints if a.accumulate == "atomic"
        ]
        return [[name for name, _ in self._pointers], *(line for line in strides if line), self.sizes]

    @property
    def _sunk(self) -> list[str]:
        return list(dict.fromkeys(a.load.tensor for a in self.planned.prologue.adjoints))

    @property
    def _pointers(self) -> list[Pair]:
        adjoints = self.planned.prologue.adjoints
        pointers = [
            ("O", "o"),
            ("DO", "do"),
            *self.prologue.pointers,
            ("lse2_ptr", "lse2"),
            ("delta_ptr", "delta"),
        ]
        pointers += [(f"{name}_ptr", name) for name in self._sunk]
        return pointers + [(f"{adjoint.name}_ptr", adjoint.name) for adjoint in adjoints]

    @property
    def sizes(self) -> list[str]:
        return [*self.planned.dims, "M_padded"]

    @property
    def kernel_parameters(self) -> list[str]:
        return declare_rows_kernel(self.lines)

    @property
    def launch(self) -> CallText:
        return triton_kernel(
            self.planned.name,
            "M_padded // BLOCK_M * B * H",
            pointers=[tensor for _, tensor in self._pointers],
            config=self.config,
            warps=4,
        )


def declare_rows_kernel(lines: Iterable[Sequence[str]]) -> list[str]:
    """Returns the parameters of a kernel over tiles of rows, line by line, with their types."""
    return [", ".join(list_types(line)) for line in lines] + ["BLOCK_M: tl.constexpr"]


class Parameters:
    """Parameters and arguments of one kernel. first: the text of its prologue, where it has one; sticks: of
    sums at edges of tiles.
    """

    def __init__(
        self,
        module: Module,
        planned: BackwardKernel,
        tensors: TritonTensors,
        first: PrologueText | None,
        sticks: SticksText | None,
    ) -> None:
        self.module, self.kernel, self.chain = module, planned, planned.chain
        self.makes, self.prologue = planned.makes, planned.prologue
        self.config = planned.config
        self.dp_order = planned.dp_order
        self.tensors, self.first, self.sticks = tensors, first, sticks
        self.over_q = self.kernel.grid.over == "q"
        self.needs_dp = self.makes != ("dv",)
        self.kv_heads: str = planned.walk.heads

    @property
    def matrices(self) -> list[str]:
        o = ["o"] if self.prologue is not None else []
        v = ["v"] if self.needs_dp and not self.kernel.v_in_k else []
        return ["q", "k", *v, *o, "do", *self.makes]

    @property
    def lines(self) -> list[list[str]]:
        pointers = [name for name, _ in self._pointers]
        return [[name for name, _ in self._own], *([pointers] if pointers else []), *self._numbers]

    @property
    def vectors(self) -> list[str]:
        if not self.kernel.softmax.normalises:
            return []
        return ["lse2", *(["delta"] if self.needs_dp else [])]

    @property
    def _own(self) -> list[Pair]:
        vectors = self.vectors if self.prologue is None else []
        return [(name.upper(), name) for name in (*self.matrices, *vectors)]

    @property
    def _pointers(self) -> list[Pair]:
        pointers: list[Pair] = [] if self.first is None else [*self.first.pointers]
        if self.prologue is not None and self.prologue.stored:
            pointers += [(f"{name}_ptr", name) for name in self.vectors]
        if self.chain.adds_dq is not None:
            pointers.append(("dq_ptr", "dq"))
        if self.sticks is not None:
            pointers += [("dlse_ptr", "dlse")] if self._reads_dlse else []
            pointers += [(f"{name}_ptr", name) for name in self.sticks.edges]
        pointers += [(f"{name}_ptr", name) for name in self._extras]
        walks = (loop.listed.memory for loop in self.kernel.regions.loops if loop.listed is not None)
        pointers += [(f"_{memory}_ptr", f"_{memory}") for memory in walks]
        return pointers + [(f"{adjoint.name}_ptr", adjoint.name) for adjoint in self._adjoints]

    @property
    def _extras(self) -> list[str]:
        return [arg.tensor.name for arg in self.module.taken if arg.tensor.name in self._loaded]

    @property
    def _adjoints(self) -> list[Adjoint]:
        return [*self.chain.adjoints, *(self.prologue.adjoints if self.prologue else ())]

    @property
    def _numbers(self) -> list[list[str]]:
        strided = [*self.matrices, *([] if self.chain.adds_dq is None else ["dq"])]
        strides = [self.tensors.strides(name) for name in strided]
        strides += [] if self.first is None else self.first.strides
        strides += [self.tensors.strides("dlse")] if self._reads_dlse else []
        strides += [self.tensors.extra_strides(name, name) for name in self._extras]
        strides += [
            self.tensors.extra_strides(adjoint.name, adjoint.load.tensor)
            for adjoint in self._adjoints
            if adjoint.accumulate == "atomic"
        ]
        return [*(line for line in strides if line), self.sizes]

    @property
    def sizes(self) -> list[str]:
        row = self.tensors.packed_queries if self.tensors.packs(Role.QUERY) else "M_padded"
        section = [] if self.kernel.grid.over == "head" else ["SECTION"]
        edges = [] if self.sticks is None else ["EDGES"]
        return [*dict.fromkeys((*self.kernel.dims, row)), *edges, *section]

    @property
    def _reads_dlse(self) -> bool:
        return self.sticks is not None and self.over_q and self.sticks.has_dlse

    @property
    def _launch_sizes(self) -> dict[str, str]:
        keys = show(longest(self.module.variant.attention, Role.KEY))
        known = {"EDGES": f"cdiv({keys}, BLOCK_N)", "SECTION": self._section}
        return {name: text for name, text in known.items() if name in self.sizes}

    @property
    def _section(self) -> str:
        heads, role = ("H", Role.KEY) if self.over_q else (self.kv_heads, Role.QUERY)
        heads = heads if self.kernel.grid.sequences is not None else f"B * {heads}"
        row_bytes = (self.tensors.d + self.tensors.dv) * DType(self.tensors.by_name["q"].dtype).bytes
        return section(self.kernel.grid.section, heads, self._usual_length(role), row_bytes)

    @property
    def _tma(self) -> list[str]:
        return ["TMA"] if self.kernel.tma else []

    @property
    def _early_dp(self) -> list[str]:
        return ["EARLY_DP"] if self.dp_order == "both" else []

    @property
    def signature(self) -> list[str]:
        constants = ["BLOCK_M", "BLOCK_N", *self._early_dp, *self._tma]
        return [", ".join(list_types(line)) for line in (*self.lines, constants)]

    @property
    def launch(self) -> CallText:
        return triton_kernel(
            self.kernel.name,
            self.grid,
            tiles=[tensor for _, tensor in self._own],
            pointers=[tensor for _, tensor in self._pointers],
            config=self.config,
            sizes=self._launch_sizes,
        )

    def _usual_length(self, role: Role) -> str:
        rows = show(longest(self.module.variant.attention, role))
        return f"{rows} // B" if self.tensors.packs(role) else rows

    @property
    def grid(self) -> str:
        sequences = self.kernel.grid.sequences
        if sequences is not None:
            tile, heads = ("BLOCK_M", "H") if self.over_q else ("BLOCK_N", self.kv_heads)
            return f"({show(sequences.rows)} // {tile} + B + 1) * {heads}"
        match self.kernel.grid.over:
            case "q":
                return "M_padded // BLOCK_M * B * H"
            case "kv":
                return f"cdiv(N, BLOCK_N) * B * {self.kv_heads}"
            case "head":
                return f"B * {self.kv_heads}"

    @property
    def _loaded(self) -> frozenset[str]:
        kernel = self.kernel
        statements: tuple[Statement, ...] = (
            *kernel.program,
            *kernel.outer,
            *kernel.regions.statements,
            *kernel.step.fetches,
            *kernel.step.masked_fetches,
            *(fetch for scale in kernel.step.scales for fetch in scale.fetches),
        )
        sequences = kernel.grid.sequences
        packed = set() if sequences is None else {sequences.cu_seqlens}
        return frozenset(packed | tensors_of(statements))
