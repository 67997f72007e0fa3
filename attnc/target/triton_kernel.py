"""The pieces of a Triton kernel's text that its template places: parameter lists, offsets, tile loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attnc.expr.nodes import Const, Expr, Index, walk
from attnc.expr.show import show
from attnc.model.tensors import DType, Role
from attnc.plan.error_bound import feature
from attnc.plan.ir import Arg, Fetch, Kernel, Let, Loop, Module, Row
from attnc.target.triton import TL_DTYPES, scalar

CONSTEXPRS = ("MASKED", "BLOCK_M", "BLOCK_N", "TMA")
#: Tensors that are read or written in whole tiles.
MATRICES = {"q": "Q", "k": "K", "v": "V", "o": "O"}


def block(size: int) -> int:
    """The tile width of a feature axis: the next power of two, at least the 16 that a dot needs."""
    return max(16, 1 << (size - 1).bit_length())


class KernelText:
    """Text of one kernel; attribute by attribute what `templates/triton/forward_*.py.jinja` prints."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        attention = module.variant.attention
        self.module, self.kernel = module, kernel
        self.d, self.dv = feature(attention.q), feature(attention.v)
        self.block_d, self.block_dv = block(self.d), block(self.dv)
        self.padded = (self.d, self.dv) != (self.block_d, self.block_dv)
        self.h_kv = scalar(kernel.kv_head)
        self.has_lse = attention.lse is not None
        self.two_pass = kernel.softmax.kind == "two_pass"
        self.uses_q_pos = any(Index("q_pos") in walk(expr) for expr in self._expressions())
        self.precision = ', input_precision="tf32x3"' if attention.q.dtype is DType.F32 else ""

    # -- loads of tiles ------------------------------------------------------------------------------------

    @property
    def load_q(self) -> str:
        return f"_load_rows(Q, b, h, q_lo, M, stride_qm, BLOCK_M, {self._width(self.d)}, TMA)"

    @property
    def load_k(self) -> str:
        return f"_load_rows(K, b, {self.kv_name}, kv_lo, N, stride_kn, BLOCK_N, {self._width(self.d)}, TMA)"

    @property
    def load_v(self) -> str:
        return f"_load_rows(V, b, {self.kv_name}, kv_lo, N, stride_vn, BLOCK_N, {self._width(self.dv)}, TMA)"

    def _width(self, size: int) -> str:
        return f"{size}, {block(size)}" if self.padded else str(size)

    @property
    def kv_name(self) -> str:
        return "h" if self.h_kv == "h" else "h_kv"

    @property
    def k_offset(self) -> str:
        return self._head_offset("k")

    @property
    def v_offset(self) -> str:
        return self._head_offset("v")

    def _head_offset(self, name: str) -> str:
        head = "" if self.kernel.kv_head == Const(0) else f" + {self.kv_name}.to(tl.int64) * stride_{name}h"
        return f"b.to(tl.int64) * stride_{name}b{head}"

    # -- parameters and arguments --------------------------------------------------------------------------

    @property
    def kernel_parameters(self) -> list[str]:
        """Lines of the kernel's parameter list: tensors, strides tensor by tensor, sizes, constants."""
        return [", ".join(_typed(line)) for line in self.parameter_lines]

    @property
    def parameter_lines(self) -> list[list[str]]:
        tensors = [*MATRICES.values(), *(f"{arg.tensor.name}_ptr" for arg in self._pointers())]
        strides = [list(self.strides(arg)) for arg in (*self.module.args, *self.module.outputs)]
        if self.kernel.grid.over == "head":
            tensors += ["acc_ptr", "l_ptr", "m_ptr"]
        return [tensors, *(line for line in strides if line), self.sizes, ["BLOCK_M", "BLOCK_N", "TMA"]]

    @property
    def sizes(self) -> list[str]:
        """Sizes known at run time; the kernel is not specialised on them, so that no length recompiles it."""
        return [*self.kernel.dims, *(["SECTION"] if self.kernel.grid.over == "q" else [])]

    @property
    def tile_parameters(self) -> list[str]:
        return ["tile", *self.kernel_parameters]

    @property
    def tile_arguments(self) -> str:
        return ", ".join(["tile", *(name for line in self.parameter_lines for name in line)])

    def strides(self, arg: Arg) -> Iterator[str]:
        """Stride arguments the kernel takes for a tensor."""
        no_head = self.kernel.kv_head == Const(0) and arg.tensor.name in ("k", "v")
        for axis, name in enumerate(arg.strides):
            if name and not (no_head and arg.tensor.axis(Role.HEAD) == axis):
                yield name

    def _pointers(self) -> Iterator[Arg]:
        everything = (*self.module.outputs, *self.module.args)
        yield from (arg for arg in everything if arg.tensor.name not in MATRICES)

    @property
    def step_names(self) -> list[str]:
        """Parameters of the step that are not about masking."""
        own: list[str]
        if self.kernel.grid.over == "q":
            own = ["l", "m", "q", "K", "V", "b", self.kv_name, "kv_lo", "N", "stride_kn", "stride_vn"]
            if not self.two_pass:
                own.insert(0, "acc")
            else:
                own = [name for name in own if name not in ("V", "stride_vn")]
            return _unique((*own, *self.kernel.step.names))
        own = ["q_lo", "k", "v", "Q", "o_rows", "l_rows", "m_rows", "b", "h", "kv_lo", "M", "N", "stride_qm"]
        if any(fetch.axes == ("kv",) for fetch in self.kernel.outer):
            own.append("kv_idx")
        names = (name for name in self.kernel.step.names if name not in ("q_idx", "q_pos"))
        return _unique((*own, *names))

    @property
    def apply_names(self) -> list[str]:
        own = ("acc", "shift", "q", "K", "V", "b", self.kv_name, "kv_lo", "N", "stride_kn", "stride_vn")
        return _unique((*own, *self.kernel.step.names))

    @property
    def step_parameters(self) -> str:
        return ", ".join(_typed((*self.step_names, *self._step_constants())))

    @property
    def apply_parameters(self) -> str:
        return ", ".join(_typed((*self.apply_names, *self._step_constants())))

    def step_arguments(self, loop: Loop) -> str:
        return ", ".join((*self.step_names, *self._step_values(loop)))

    def apply_arguments(self, loop: Loop) -> str:
        return ", ".join((*self.apply_names, *self._step_values(loop)))

    @property
    def branches(self) -> bool:
        """Whether the step learns at run time that its tile is partial."""
        return any(not isinstance(loop.masked, bool) for loop in self.kernel.regions.loops)

    @property
    def masked(self) -> str:
        """The step's parameter that says so."""
        return "partial" if self.branches else "MASKED"

    def _step_constants(self) -> list[str]:
        masked = [self.masked] if self.kernel.step.keep is not None else []
        return [*masked, *(["BLOCK_M"] if self._step_needs_block_m() else []), "BLOCK_N", "TMA"]

    def _step_values(self, loop: Loop) -> list[str]:
        partial = str(loop.masked) if isinstance(loop.masked, bool) else scalar(loop.masked)
        return [f"{name}={partial if name == self.masked else name}" for name in self._step_constants()]

    def _step_needs_block_m(self) -> bool:
        return self.kernel.grid.over == "head" or self.kernel.softmax.dropout is not None

    @property
    def step_result(self) -> str:
        return "l, m" if self.two_pass else "acc, l, m"

    # -- single expressions --------------------------------------------------------------------------------

    @property
    def q_lo(self) -> str:
        tile = "q_tiles - 1 - rank // heads" if self.kernel.grid.longest_first else "rank // heads"
        return f"({tile}) * BLOCK_M" if self.kernel.grid.longest_first else f"{tile} * BLOCK_M"

    @property
    def persistent_note(self) -> str:
        return ", tile after tile: one program per SM" if self.kernel.grid.persistent else ""

    @property
    def keep_scale(self) -> str:
        assert self.kernel.softmax.dropout is not None
        p = scalar(self.kernel.softmax.dropout.p)
        return f"tl.where({p} < 1.0, 1.0 / (1.0 - {p}), 0.0)"

    @property
    def row_mask(self) -> str:
        return "row[:, None]" + ("" if self.dv == self.block_dv else f" & (d[None, :] < {self.dv})")

    @property
    def store_o(self) -> str:
        dtype = TL_DTYPES[self.kernel.bound.o_dtype]
        return (
            f"_store_rows(O, b, h, q_lo, M, stride_om, o.to({dtype}), BLOCK_M, {self._width(self.dv)}, TMA)"
        )

    @property
    def bounds_comment(self) -> str:
        mask = self.module.variant.attention.mask
        what = "q" if self.kernel.grid.over == "head" else "kv"
        if isinstance(mask, Const):
            return f"no mask: whole {what} tiles, then the keys that are left" if what == "kv" else ""
        text = mask.span.text if mask.span else show(mask)
        return f"{text}: which {what} tiles are partial, and which are full"

    def reads(self, index: str) -> bool:
        """Whether a loop bound or a guard uses the index."""
        bounds = (item.value for item in self.kernel.regions.bounds if isinstance(item, Let))
        loads = (
            e for item in self.kernel.regions.bounds if isinstance(item, Fetch) for e in item.load.indices
        )
        loops = (expr for loop in self.kernel.regions.loops for expr in loop.expressions)
        return any(Index(index) in walk(expr) for expr in (*bounds, *loads, *loops))

    def _expressions(self) -> Iterator[Expr]:
        kernel = self.kernel
        for statement in (*kernel.program, *kernel.outer, *kernel.step.fetches, *kernel.step.masked_fetches):
            match statement:
                case Let(value=value):
                    yield value
                case Row(indices=indices):
                    yield from indices
                case Fetch(load=load, guard=guard):
                    yield from (*load.indices, guard)
        yield from (expr for expr in (kernel.step.score, kernel.step.keep) if expr is not None)


def _typed(names: Iterable[str]) -> list[str]:
    return [f"{name}: tl.constexpr" if name in CONSTEXPRS else name for name in names]


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
