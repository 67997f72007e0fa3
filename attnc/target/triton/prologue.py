"""Text of what the first kernel of a backward makes of each row: delta, base-2 lse, the gradient of the
sink.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from attnc.expr.nodes import FALSE, TRUE, Const
from attnc.model.tensors import Role
from attnc.plan.ir import Module, Statement
from attnc.plan.ir.backward import Preprocess, Prologue
from attnc.plan.signature import block, stride_name
from attnc.target.declared import Record
from attnc.target.tensors import Tensors
from attnc.target.triton.kernel import typed
from attnc.target.triton.launches import triton_kernel
from attnc.target.triton.printer import address, offset, scalar

#: A kernel's parameter and the tensor that is passed for it.
Pair: TypeAlias = tuple[str, str]


class TritonTensors(Tensors):
    """The tensors of one module as its backward sees them."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self.padded = (self.d, self.dv) != (block(self.d), block(self.dv))

    def width(self, name: str) -> str:
        size = self.size(name)
        return f"{size}, {block(size)}" if self.padded else str(size)

    def offset(self, name: str, head: str) -> str:
        """From the first element to the rows of one head, of the sequence at hand."""
        return offset(self.row_zero(name, head))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrologueText:
    """The prologue of a kernel that owns q tiles. tile: the number of its q tile."""

    module: Module
    prologue: Prologue
    tensors: TritonTensors

    @property
    def has_dlse(self) -> bool:
        """Whether lse is an output, which may have a gradient of its own."""
        return not self.module.kept

    @property
    def pointers(self) -> list[Pair]:
        return [("lse_ptr", "lse"), *([("dlse_ptr", "dlse")] if self.has_dlse else [])]

    @property
    def strides(self) -> list[list[str]]:
        return [self.tensors.strides(name) for name in ("lse", *(["dlse"] if self.has_dlse else []))]

    @property
    def in_rows(self) -> str:
        """Behind a packed sequence are the rows of the next; else there is room for whole tiles."""
        return ", mask=q_idx < M" if self.tensors.packs(Role.QUERY) else ""

    def offset(self, name: str) -> str:
        """From the first element of lse, or of its gradient, to those of this head."""
        return self.tensors.offset(name, "h")

    def row(self, name: str) -> str:
        """From there to the rows of the tile."""
        tensor = self.tensors.by_name[name]
        axis = tensor.axis(Role.QUERY)
        return "0" if axis is None else f"q_idx.to(tl.int64) * {stride_name(tensor, axis)}"

    @property
    def sink(self) -> str:
        assert self.prologue.sink is not None
        return scalar(self.prologue.sink)

    @property
    def sink_ends(self) -> Iterator[str]:
        """The gradients of what the sink loads, from that of the sink itself."""
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
        self.tma = module.kernels[0].tma  # what the module's functions take
        self.tensors = TritonTensors(module)
        self.prologue = PrologueText(module=module, prologue=planned.prologue, tensors=self.tensors)

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
        """Parameters: pointers, strides tensor by tensor, sizes."""
        adjoints = self.planned.prologue.adjoints
        strides = [self.tensors.strides("o"), self.tensors.strides("do"), *self.prologue.strides]
        strides += [self.tensors.extra_strides(name, name) for name in self._sunk]
        strides += [
            self.tensors.extra_strides(a.name, a.load.tensor) for a in adjoints if a.accumulate == "atomic"
        ]
        return [[name for name, _ in self._pointers], *(line for line in strides if line), self.sizes]

    @property
    def _sunk(self) -> list[str]:
        """What the sink loads."""
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
        return [", ".join(typed(line)) for line in self.lines] + ["BLOCK_M: tl.constexpr"]

    @property
    def launch(self) -> Record:
        """The declaration of the launch."""
        return triton_kernel(
            self.planned.name,
            "M_padded // BLOCK_M * B * H",
            pointers=[tensor for _, tensor in self._pointers],
            config=self.config,
            warps=4,
        )
