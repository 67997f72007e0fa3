"""How Triton's backward kernels address q, k, v, o, lse and their gradients: offsets and tile widths."""

from __future__ import annotations

from typing import TypeAlias

from attnc.plan.columns import block
from attnc.plan.ir import Module
from attnc.target.tensors import Tensors
from attnc.target.triton.printer import offset

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
