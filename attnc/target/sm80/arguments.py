"""The one struct of arguments that all backward kernels of a CUDA module take, as C++ declares it and Python
packs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnc.model.dtypes import DType
from attnc.model.tensors import Role
from attnc.plan.ir import Module
from attnc.plan.ir.backward import Adjoint
from attnc.plan.sm80 import backward_layout_of
from attnc.plan.steps import dims_of, sizes
from attnc.target.kernel_view import Tensors
from attnc.target.sm80.printer import stored_type
from attnc.target.sticks import BEFORE, BEHIND, hands_on

#: Bits of lists, and of inverted ones, where a mask lists blocks.
LISTS = ("_list_bits", "_row_bits")


class ArgumentText:
    """Pointers, strides and sizes, in the order of the struct. maps: tensors that TMA copies, whose maps come
    first; summed: dk and dv, where blocks may share the walk of a tile.
    """

    maps: tuple[str, ...] = ()
    summed: Sequence[str] = ()

    def __init__(self, module: Module) -> None:
        assert module.backward is not None
        self.module, self._backward, self._rounds = module, module.backward, module.backward.rounds
        self.tensors = Tensors(module)
        self.has_dlse = module.variant.attention.lse is not None
        self.has_epilogue = self._backward.epilogue is not None
        is_ordered = module.variant.attention.softmax.form == "stick_breaking"
        #: Sums at the edges of tiles that one kernel leaves to others (`target.sticks`).
        self.edges = (BEHIND, *([BEFORE] if hands_on(module) else [])) if is_ordered else ()
        #: Of rows of queries: o, lse and what is computed of them.
        self._reads_rows = self._backward.preprocess is not None
        self.adds_dq = any(planned.chain.adds_dq is not None for planned in self._backward.kernels)
        made = dict.fromkeys(name for planned in self._backward.kernels for name in planned.makes)
        self.made: list[str] = [*(["dq"] if self.adds_dq else []), *made]
        over_keys = [planned for planned in self._backward.kernels if not planned.over_q]
        shares = backward_layout_of(self._backward).shares_heads
        #: What blocks sum that share the query heads of a kv tile.
        self.parts = [f"{name}_sum" for x in over_keys if shares and x.sums_heads for name in x.makes]
        self.inputs = [arg.tensor.name for arg in module.taken]
        dtypes = {arg.tensor.name: DType(arg.tensor.dtype) for arg in (*module.taken, *module.outputs)}
        self.dtypes = {**dtypes, "do": dtypes["o"]}

    @property
    def adjoints(self) -> Iterator[Adjoint]:
        if self._backward.epilogue is not None:
            yield from self._backward.epilogue.adjoints
        if self._backward.preprocess is not None:
            yield from self._backward.preprocess.prologue.adjoints
        for planned in self._backward.kernels:
            yield from planned.chain.adjoints

    def adjoint_dtype(self, adjoint: Adjoint) -> DType:
        """Returns the type of its workspace: that of the gradient itself, where nothing is left to sum."""
        part = next(p for g in self._backward.gradients for p in g.parts if p.name == adjoint.name)
        whole = (
            adjoint.along in (("q", "kv"), ("q", "d"))
            and adjoint.accumulate == "two_pass"
            and len(part.places) == 4
        )
        own = self.dtypes[adjoint.load.tensor]
        return own if whole and own is self.dtypes["q"] else DType.F32

    @property
    def as_elements(self) -> tuple[str, ...]:
        attention = self.module.variant.attention
        tensors = {f"d{tensor.name}": tensor for tensor in (attention.k, attention.v)}
        return tuple(name for name, x in tensors.items() if attention.gradient_of(x).dtype is x.dtype)

    @property
    def _reads_o(self) -> bool:
        return self._reads_rows or self.has_epilogue

    @property
    def _lse(self) -> list[str]:
        dlse = ["dlse"] if self.has_dlse else []
        return ["lse", *dlse] if self._reads_rows else dlse if self.edges else []

    @property
    def pointers(self) -> list[tuple[str, str]]:
        def name_type(dtype: DType) -> str:
            return stored_type(dtype, self.module.variant)

        element = name_type(self.dtypes["q"])
        found = [(f"const {name_type(self.dtypes[name])}", name) for name in self.inputs]
        o = name_type(self.dtypes["o"])
        found += [(f"const {o}", "o")] if self._reads_o else []
        found += [(o if self.has_epilogue else f"const {o}", "do")]
        found += [(f"const {o}", "dresult")] if self.has_epilogue else []
        found += [("const float", name) for name in self._lse]
        found += [(element if name in ("dq", *self.as_elements) else "float", name) for name in self.made]
        sums = ["dq_sum"] if self.adds_dq else []
        of_rows = ["lse2", "delta"] if self._reads_rows else []
        found += [("float", name) for name in (*of_rows, *self.edges, *sums, *self.parts)]
        found += [(name_type(self.adjoint_dtype(adjoint)), adjoint.name) for adjoint in self.adjoints]
        found += [("unsigned char", name) for name in (self._rounds.workspaces if self._rounds else ())]
        found += [("float", name) for name in self.summed]
        return [*found, *(("int", name) for name in LISTS if self.module.lists is not None)]

    @property
    def strides(self) -> list[list[str]]:
        matrices = {"q", "k", "v"}
        v = ["v"] if "v" in self.tensors.by_name else []  # not where it is columns of k
        before = ("q", "k", *v, *(["o"] if self._reads_o else []), "do")
        given = (*before, *(["dresult"] if self.has_epilogue else []), *self._lse, *self.made)
        found = [self.tensors.strides(name) for name in given]
        found += [self.tensors.extra_strides(name, name) for name in self.inputs if name not in matrices]
        found += [
            self.tensors.extra_strides(adjoint.name, adjoint.load.tensor)
            for adjoint in self.adjoints
            if adjoint.accumulate == "atomic"
        ]
        return [line for line in found if line]

    @property
    def sizes(self) -> list[str]:
        dims = [name for planned in self._backward.kernels for name in planned.dims]
        if self._backward.preprocess is not None:
            dims += self._backward.preprocess.dims
        if self._backward.epilogue is not None:
            dims += self._backward.epilogue.dims
        if self.adds_dq:  # rounded by a kernel of its own
            dims += sizes(self.module.variant.attention, dims_of(()))
        padded = ["M_padded", *(["ROW_TILE"] if self.tensors.packs(Role.QUERY) else [])]
        edges = ["EDGES"] if self.edges else []
        parts = ["WALK_PARTS", "KEY_ROWS"] if self.parts else []
        rounds = self._rounds.passed if self._rounds else ()
        return [*dict.fromkeys(dims), *padded, *edges, *parts, *rounds, "SECTION", "KV_SECTION"]

    @property
    def fields(self) -> Iterator[str]:
        for kind, name in self.pointers:
            yield f"{kind}* {name}_ptr;"
        for line in self.strides:
            yield f"long long {', '.join(line)};"
        yield f"int {', '.join(self.sizes)};"
