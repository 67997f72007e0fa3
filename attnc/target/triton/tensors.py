"""How backward kernels address q, k, v, o, lse and their gradients: strides, offsets, tile widths."""

from __future__ import annotations

from typing import TypeAlias

from attnc.expr.show import show
from attnc.model.tensors import Ragged, Role, Tensor
from attnc.plan.columns import block, feature
from attnc.plan.ir import Module
from attnc.plan.signature import stride_name

#: A kernel's parameter and the tensor that is passed for it.
Pair: TypeAlias = tuple[str, str]

#: Matrices whose rows are queries; those of the others are keys.
BY_QUERY = frozenset({"q", "do", "dq", "o"})


class Tensors:
    """The tensors of one module as its backward sees them, by the names that they have there."""

    def __init__(self, module: Module) -> None:
        found = {arg.tensor.name: arg.tensor for arg in (*module.args, *module.outputs, *module.kept)}
        attention = module.variant.attention
        self.by_name: dict[str, Tensor] = {
            **found,
            **{f"d{name}": attention.gradient_of(found[name]) for name in ("q", "k", "v", "o", "lse")},
        }
        self._packed = {
            role: isinstance(found[name].storage, Ragged)
            for name, role in (("q", Role.QUERY), ("k", Role.KEY))
        }
        self.d, self.dv = feature(found["q"]), feature(found["v"])
        self.padded = (self.d, self.dv) != (block(self.d), block(self.dv))

    def packs(self, role: Role) -> bool:
        """Whether the rows of sequences follow each other: those of q, do, o and lse, or those of k and v."""
        return self._packed[role]

    @property
    def packed_queries(self) -> str:
        """The rows of all packed sequences of queries."""
        return show(self.by_name["q"].size(Role.QUERY))

    def size(self, name: str) -> int:
        return self.d if name in ("q", "k", "dq", "dk") else self.dv

    def width(self, name: str) -> str:
        size = self.size(name)
        return f"{size}, {block(size)}" if self.padded else str(size)

    def strides(self, name: str) -> list[str]:
        """Stride parameters of q, k, v, o, lse or the gradient of one."""
        tensor = self.by_name[name]
        names = (stride_name(tensor, axis) for axis in range(len(tensor.shape)))
        return [stride for stride in names if stride]

    def offset(self, name: str, head: str) -> str:
        """From the first element to the rows of one head, of the sequence at hand."""
        tensor = self.by_name[name]
        by_query = name in BY_QUERY or name.endswith("lse")
        rows, first = (Role.QUERY, "q_first") if by_query else (Role.KEY, "k_first")
        terms = [(first, rows) if self.packs(rows) else ("b", Role.BATCH), (head, Role.HEAD)]
        return " + ".join(
            f"{index}.to(tl.int64) * {stride_name(tensor, axis)}"
            for index, role in terms
            if (axis := tensor.axis(role)) is not None
        )

    def extra_strides(self, name: str, tensor: str) -> list[str]:
        """Strides of `name`, which has the shape of the input `tensor`."""
        rank = len(self.by_name[tensor].shape)
        return [f"stride_{name}_{axis}" for axis in range(rank)]
