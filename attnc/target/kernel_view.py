"""What is printed of a kernel whatever the target: the one view of a plan that all texts begin with, and what
backward kernels know of q, k, v, o, lse and their gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from attnc.expr.interval import is_finite
from attnc.expr.nodes import Const, Dim, Dot, Index, show
from attnc.expr.simplify import substitute
from attnc.model.tensors import Role, Tensor
from attnc.plan.access import Rows
from attnc.plan.ir import Arg, Decode, Forward, Kernel, Module, Statement
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.ir.kernel import DotPart
from attnc.plan.signature import RowZero, feature, stride_name
from attnc.plan.steps import select_per_head, starts_with
from attnc.target.quote import comment, expression


class KernelView:
    """Attribute by attribute what templates of all targets print of a kernel: its loops, rows that they never
    reach, strides and sizes that it takes, and where its rows lie.
    """

    module: Module
    kernel: Kernel

    @property
    def bounds_comment(self) -> str:
        mask = self.module.variant.attention.mask
        if isinstance(mask, Const):
            return self.without_mask
        text = expression(mask.span) if mask.span else comment(show(mask))
        return f"{text}: which {self.kernel.regions.axis} tiles are partial, and which are full"

    @property
    def without_mask(self) -> str:
        whole = "no mask: whole kv tiles, then the keys that are left"
        return whole if self.kernel.regions.axis == "kv" else ""

    def reads(self, index: str) -> bool:
        """Returns whether what comes before the step uses the index."""
        return starts_with(self.kernel, index)

    def strides(self, arg: Arg) -> list[str]:
        """Returns strides that the kernel takes of a tensor, in elements."""
        no_head = self.kernel.kv_head == Const(0) and arg.tensor.name in ("k", "v")
        return [
            name
            for axis, name in enumerate(arg.strides)
            if name and not (no_head and arg.tensor.axis(Role.HEAD) == axis)
        ]

    @property
    def size_names(self) -> list[str]:
        """Sizes known at run time; the kernel is not specialised on them, so that no length recompiles it."""
        return [*self.kernel.dims, *(["SECTION"] if self.kernel.grid.over == "q" else [])]

    def rows(self, name: str) -> Rows:
        """Returns where the rows of q, k, v or o lie."""
        return self.kernel.rows.get(name, Rows(tensor=name))


class BackwardView(KernelView):
    """What templates of all targets print of a kernel of a backward. groups: it walks over the query heads of
    a group.
    """

    kernel: BackwardKernel
    groups: bool

    @property
    @abstractmethod
    def starts_with_program(self) -> bool:
        """Whether statements stand in front of all else where one head is at hand."""

    @property
    def clears_rows(self) -> bool:
        """Whether a weight past the end of the queries, where the product is 0, or its slope, might be
        infinite: 0 times it would be NaN.
        """
        kernel = self.kernel
        read = (kernel.step.score, kernel.chain.slope)
        exprs = [substitute(kernel.chain.inline(x), {Dot(): Const(0.0)}) for x in read if x is not None]
        return not (kernel.softmax.normalises or kernel.over_q or all(map(is_finite, exprs)))

    @property
    def program(self) -> tuple[Statement, ...]:
        if not self.groups:
            return self.kernel.program if self.starts_with_program else ()
        late = self.head_program
        return tuple(item for item in self.kernel.program if item not in late)

    @property
    def head_program(self) -> tuple[Statement, ...]:
        if not self.groups:
            return () if self.starts_with_program else self.kernel.program
        return select_per_head(self.kernel.program)


class OutputView(KernelView):
    """What templates of all targets print of a kernel that computes o."""

    kernel: Forward | Decode

    @property
    def kv_name(self) -> str:
        return "h" if self.kernel.kv_head == Index("h") else "h_kv"

    def row_zero(self, name: str) -> RowZero:
        """Returns where row 0 of q, k, v, o or lse lies, of the sequence and head at hand."""
        rows, is_key = self.rows("o" if name in ("lse", "attention") else name), name in ("k", "v")
        held = rows.tensor if is_key else name
        tensors = (arg.tensor for arg in (*self.module.args, *self.module.outputs, *self.module.kept))
        head = "h" if not is_key else "" if self.kernel.kv_head == Const(0) else self.kv_name
        tensor = next(x for x in tensors if x.name == held)
        return RowZero(tensor=tensor, head=head, first=rows.first)

    @property
    def clears(self) -> bool:
        return self.kernel.stored != Dim("M")

    @property
    def has_lse(self) -> bool:
        written = (*self.module.outputs, *self.module.kept)
        return any(arg.tensor.name == "lse" for arg in written)


def parts_of(module: Module, kernel: Kernel) -> tuple[DotPart, ...]:
    """Returns the parts of the columns of q and k, at least one."""
    return kernel.parts or (DotPart(first=0, width=feature(module.variant.attention.k)),)


#: Matrices whose rows are queries; those of the others are keys.
BY_QUERY = frozenset({"q", "do", "dq", "dresult", "o"})


class Tensors:
    """The tensors of one module as its backward sees them, by the names that they have there."""

    def __init__(self, module: Module) -> None:
        found = {arg.tensor.name: arg.tensor for arg in (*module.args, *module.outputs, *module.kept)}
        attention = module.variant.attention
        differentiated = [name for name in ("q", "k", "v", "o", "lse") if name in found]
        self.by_name: dict[str, Tensor] = {
            **found,
            **{f"d{name}": attention.gradient_of(found[name]) for name in differentiated},
            "dresult": replace(found["o"], name="dresult"),
        }
        self._packed = {
            role: found[name].storage.is_packed for name, role in (("q", Role.QUERY), ("k", Role.KEY))
        }
        self.d, self.dv = feature(attention.q), feature(attention.v)

    def packs(self, role: Role) -> bool:
        """Returns whether the rows of sequences follow each other: those of q, do, o and lse, or those of k
        and v.
        """
        return self._packed[role]

    def row_zero(self, name: str, head: str) -> RowZero:
        """Returns where row 0 of a matrix, lse or a gradient lies, of the sequence and head at hand."""
        by_query = name in BY_QUERY or name.endswith("lse")
        role, first = (Role.QUERY, "q_first") if by_query else (Role.KEY, "k_first")
        return RowZero(tensor=self.by_name[name], head=head, first=first if self.packs(role) else None)

    @property
    def packed_queries(self) -> str:
        return show(self.by_name["q"].size(Role.QUERY))

    def size(self, name: str) -> int:
        return self.d if name in ("q", "k", "dq", "dk") else self.dv

    def strides(self, name: str) -> list[str]:
        """Returns stride parameters of q, k, v, o, lse or the gradient of one."""
        tensor = self.by_name[name]
        names = (stride_name(tensor, axis) for axis in range(len(tensor.shape)))
        return [stride for stride in names if stride]

    def extra_strides(self, name: str, tensor: str) -> list[str]:
        """Returns strides of `name`, which has the shape of the input `tensor`."""
        rank = len(self.by_name[tensor].shape)
        return [f"stride_{name}_{axis}" for axis in range(rank)]
