"""Parameters of a backward kernel and the declaration of its launch: one list, so that they agree."""

from __future__ import annotations

from attnc.expr.nodes import Load, Search, show, walk
from attnc.model.tensors import DType, Role
from attnc.plan.ir import Fetch, Let, Module, Row, Statement
from attnc.plan.ir.backward import Adjoint, BackwardKernel
from attnc.plan.storage import longest
from attnc.target.declared import Record, section
from attnc.target.triton.kernel import typed
from attnc.target.triton.launches import triton_kernel
from attnc.target.triton.prologue import Pair, PrologueText, TritonTensors


class Parameters:
    """Parameters and arguments of one kernel. first: the text of its prologue, where it has one."""

    def __init__(
        self, module: Module, planned: BackwardKernel, tensors: TritonTensors, first: PrologueText | None
    ) -> None:
        self.module, self.kernel, self.chain = module, planned, planned.chain
        self.makes, self.prologue = planned.makes, planned.prologue
        self.config = planned.config
        self.dp_order = planned.dp_order
        self.tensors, self.first = tensors, first
        self.over_q = self.kernel.grid.over == "q"
        self.needs_dp = self.makes != ("dv",)
        self.kv_heads = planned.walk.heads

    @property
    def matrices(self) -> list[str]:
        """The matrices that the kernel reads and writes, in the order of its parameters."""
        o = ["o"] if self.prologue is not None else []
        return ["q", "k", *(["v"] if self.needs_dp else []), *o, "do", *self.makes]

    @property
    def lines(self) -> list[list[str]]:
        """Parameters line by line: matrices, pointers, strides tensor by tensor, sizes."""
        pointers = [name for name, _ in self._pointers]
        return [[name for name, _ in self._own], *([pointers] if pointers else []), *self._numbers]

    @property
    def _vectors(self) -> list[str]:
        return ["lse2", *(["delta"] if self.needs_dp else [])]

    @property
    def _own(self) -> list[Pair]:
        """What tiles are loaded from and stored to."""
        vectors = self._vectors if self.prologue is None else []
        return [(name.upper(), name) for name in (*self.matrices, *vectors)]

    @property
    def _pointers(self) -> list[Pair]:
        pointers: list[Pair] = [] if self.first is None else [*self.first.pointers]
        if self.prologue is not None and self.prologue.stored:
            pointers += [(f"{name}_ptr", name) for name in self._vectors]
        if self.chain.adds_dq is not None:
            pointers.append(("dq_ptr", "dq"))
        pointers += [(f"{name}_ptr", name) for name in self._extras]
        return pointers + [(f"{adjoint.name}_ptr", adjoint.name) for adjoint in self._adjoints]

    @property
    def _extras(self) -> list[str]:
        return [arg.tensor.name for arg in self.module.args if arg.tensor.name in self._loaded]

    @property
    def _adjoints(self) -> list[Adjoint]:
        return [*self.chain.adjoints, *(self.prologue.adjoints if self.prologue else ())]

    @property
    def _numbers(self) -> list[list[str]]:
        strided = [*self.matrices, *([] if self.chain.adds_dq is None else ["dq"])]
        strides = [self.tensors.strides(name) for name in strided]
        strides += [] if self.first is None else self.first.strides
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
        return [*dict.fromkeys((*self.kernel.dims, row)), *section]

    @property
    def _section(self) -> str:
        """Heads that programs share: those whose K and V, or q and do, lie in the L2 cache together."""
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
        return [", ".join(typed(line)) for line in (*self.lines, constants)]

    @property
    def launch(self) -> Record:
        """The declaration of the launch."""
        return triton_kernel(
            self.kernel.name,
            self.grid,
            tiles=[tensor for _, tensor in self._own],
            pointers=[tensor for _, tensor in self._pointers],
            config=self.config,
            sizes={"SECTION": self._section} if "SECTION" in self.sizes else {},
        )

    def _usual_length(self, role: Role) -> str:
        """Rows of a sequence; of packed ones, their mean."""
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
        """Inputs besides q, k and v that this kernel reads."""
        kernel = self.kernel
        statements: tuple[Statement, ...] = (
            *kernel.program,
            *kernel.outer,
            *kernel.regions.statements,
            *kernel.step.fetches,
            *kernel.step.masked_fetches,
        )
        sequences = kernel.grid.sequences
        found = set() if sequences is None else {sequences.cu_seqlens}
        for item in statements:
            match item:
                case Row(tensor=tensor) | Fetch(load=Load(tensor=tensor)):
                    found.add(tensor)
                case Let(value=value):
                    found |= {node.tensor for node in walk(value) if isinstance(node, Search)}
        return frozenset(found)
