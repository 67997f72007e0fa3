"""What backward kernels of every target know of q, k, v, o, lse and their gradients: sizes and strides."""

from __future__ import annotations

from attnc.expr.nodes import show
from attnc.model.tensors import Role, Tensor
from attnc.plan.ir import Module
from attnc.plan.signature import Term, row_zero, stride_name
from attnc.plan.storage import feature

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
            role: found[name].storage.is_packed for name, role in (("q", Role.QUERY), ("k", Role.KEY))
        }
        self.d, self.dv = feature(found["q"]), feature(found["v"])

    def packs(self, role: Role) -> bool:
        """Whether the rows of sequences follow each other: those of q, do, o and lse, or those of k and v."""
        return self._packed[role]

    def row_zero(self, name: str, head: str) -> tuple[Term, ...]:
        """Where row 0 of a matrix, lse or a gradient lies, of the sequence and head at hand."""
        by_query = name in BY_QUERY or name.endswith("lse")
        role, first = (Role.QUERY, "q_first") if by_query else (Role.KEY, "k_first")
        return row_zero(self.by_name[name], head=head, first=first if self.packs(role) else None)

    @property
    def packed_queries(self) -> str:
        """The rows of all packed sequences of queries."""
        return show(self.by_name["q"].size(Role.QUERY))

    def size(self, name: str) -> int:
        return self.d if name in ("q", "k", "dq", "dk") else self.dv

    def strides(self, name: str) -> list[str]:
        """Stride parameters of q, k, v, o, lse or the gradient of one."""
        tensor = self.by_name[name]
        names = (stride_name(tensor, axis) for axis in range(len(tensor.shape)))
        return [stride for stride in names if stride]

    def extra_strides(self, name: str, tensor: str) -> list[str]:
        """Strides of `name`, which has the shape of the input `tensor`."""
        rank = len(self.by_name[tensor].shape)
        return [f"stride_{name}_{axis}" for axis in range(rank)]
