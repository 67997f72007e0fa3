"""What is printed of a kernel whatever the target: the one view of a plan that all texts begin with, and what
backward kernels know of q, k, v, o, lse and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from attnc.expr.finite import is_finite
from attnc.expr.nodes import Const, Dim, Dot, Index, show
from attnc.expr.simplify import substitute
from attnc.model.attention import Form
from attnc.model.tensors import Role, Tensor
from attnc.plan.access import Rows
from attnc.plan.ir import Arg, Decode, Forward, Kernel, Module, Statement
from attnc.plan.ir.backward import BackwardKernel, Chain
from attnc.plan.ir.kernel import DotPart
from attnc.plan.signature import RowZero, feature, stride_name
from attnc.plan.steps import select_per_head, starts_with
from attnc.target.quote import comment, expression


class KernelView:
    """What templates of all targets print of a kernel: its loops, rows that they never reach, strides that it
    takes, and where its rows lie.

    without_mask: what is said of tiles where there is no mask; as is usual where it is None.
    """

    def __init__(self, module: Module, kernel: Kernel, without_mask: str | None = None) -> None:
        self._module, self._kernel = module, kernel
        if without_mask is None:
            whole = "no mask: whole kv tiles, then the keys that are left"
            without_mask = whole if kernel.regions.axis == "kv" else ""
        self._without_mask = without_mask

    @property
    def bounds_comment(self) -> str:
        mask = self._module.variant.attention.mask
        if isinstance(mask, Const):
            return self._without_mask
        text = expression(mask.span) if mask.span else comment(show(mask))
        regions = self._kernel.regions
        if not regions.bounds:  # the list says all: tiles of single keys
            return f"{text}: the {'keys' if regions.axis == 'kv' else 'queries'} to visit"
        return f"{text}: which {regions.axis} tiles are partial, and which are full"

    def reads(self, index: str) -> bool:
        return starts_with(self._kernel, index)

    def strides(self, arg: Arg) -> list[str]:
        no_head = self._kernel.kv_head == Const(0) and arg.tensor.name in ("k", "v")
        return [
            name
            for axis, name in enumerate(arg.strides)
            if name and not (no_head and arg.tensor.axis(Role.HEAD) == axis)
        ]

    def rows(self, name: str) -> Rows:
        return self._kernel.rows.get(name, Rows(tensor=name))


def sizes_of_kernel(kernel: Kernel) -> list[str]:
    """Returns sizes known at run time; the kernel is not specialised on them, so that no length recompiles
    it.
    """
    return [*kernel.dims, *(["SECTION"] if kernel.grid.over == "q" else [])]


class BackwardView(KernelView):
    """What templates of all targets print of a kernel of a backward, which walks over the query heads of a
    group where it sums heads.

    starts_with_program: whether statements stand in front of all else where one head is at hand.
    """

    def __init__(
        self,
        module: Module,
        kernel: BackwardKernel,
        *,
        starts_with_program: bool,
        without_mask: str | None = None,
    ) -> None:
        super().__init__(module, kernel, without_mask)
        self._backward, self._starts_with_program = kernel, starts_with_program

    @property
    def clears_rows(self) -> bool:
        """Whether a weight past the end of the queries, where the product is 0, or its slope, might be
        infinite: 0 times it would be NaN.
        """
        kernel = self._backward
        read = (kernel.step.score, kernel.chain.slope)
        exprs = [substitute(kernel.chain.inline(x), {Dot(): Const(0.0)}) for x in read if x is not None]
        is_alone = kernel.over_q and not kernel.softmax.breaks_sticks  # nothing of other rows follows from it
        return not (kernel.softmax.normalises or is_alone or all(map(is_finite, exprs)))

    @property
    def paper(self) -> str:
        """Where the algorithm of a kernel over keys stands, behind what it makes."""
        if not self._backward.softmax.normalises:
            return ""
        return (
            f": FlashAttention-{'1, algorithm 4' if self._backward.grid.over == 'head' else '2, algorithm 2'}"
        )

    @property
    def program(self) -> tuple[Statement, ...]:
        if not self._backward.sums_heads:
            return self._backward.program if self._starts_with_program else ()
        late = self.head_program
        return tuple(item for item in self._backward.program if item not in late)

    @property
    def head_program(self) -> tuple[Statement, ...]:
        if not self._backward.sums_heads:
            return () if self._starts_with_program else self._backward.program
        return select_per_head(self._backward.program)


def name_gradients(makes: Iterable[str], chain: Chain) -> str:
    """Returns `dk, dv and dbias`: what a kernel makes, and the gradients of what its scores load."""
    *others, last = (*makes, *dict.fromkeys(f"d{adjoint.load.tensor}" for adjoint in chain.adjoints)) or ("",)
    return f"{', '.join(others)} and {last}" if others else last


#: What stands between the products of a step, by the form of normalisation.
_BETWEEN: Mapping[Form, str] = {
    "softmax": "softmax", "softpick": "softpick", "stick_breaking": "stick-breaking", "none": "weighing"
}  # fmt: skip


class OutputView(KernelView):
    """What templates of all targets print of a kernel that computes o. kv_name: the index of its K/V head."""

    def __init__(self, module: Module, kernel: Forward | Decode, kv_name: str = "") -> None:
        super().__init__(module, kernel)
        self._output = kernel
        self.kv_name = kv_name or ("h" if kernel.kv_head == Index("h") else "h_kv")

    def row_zero(self, name: str) -> RowZero:
        rows, is_key = self.rows("o" if name in ("lse", "attention") else name), name in ("k", "v")
        held = rows.tensor if is_key else name
        module = self._module
        tensors = (arg.tensor for arg in (*module.taken, *module.outputs, *module.kept))
        head = "h" if not is_key else "" if self._kernel.kv_head == Const(0) else self.kv_name
        tensor = next(x for x in tensors if x.name == held)
        return RowZero(tensor=tensor, head=head, first=rows.first)

    @property
    def clears(self) -> bool:
        return self._output.stored != Dim("M")

    @property
    def has_lse(self) -> bool:
        written = (*self._module.outputs, *self._module.kept)
        return any(arg.tensor.name == "lse" for arg in written)

    @property
    def between_products(self) -> str:
        return _BETWEEN[self._output.softmax.form]

    @property
    def results(self) -> str:
        return "o and lse" if self.has_lse else "o"

    @property
    def decoded(self) -> str:
        """What a kernel that decodes makes, and of which rows."""
        assert isinstance(self._output, Decode)
        pack, split = self._output.pack, self._output.split
        hands_lse = split is not None and self._output.softmax.has_statistics
        results = "o and lse" if hands_lse else self.results
        rows = "q rows of one head" if pack is None else "(query, head) rows of one KV head"
        return f"{results} of one tile of {rows}{'' if split is None else ', from a split of its keys'}."


def parts_of(module: Module, kernel: Kernel) -> tuple[DotPart, ...]:
    """Returns the parts of the columns of q and k, at least one."""
    return kernel.parts or (DotPart(first=0, width=feature(module.variant.attention.q)),)


#: Matrices whose rows are queries; those of the others are keys.
BY_QUERY = frozenset({"q", "do", "dq", "dresult", "o"})


class Tensors:
    """The tensors of one module as its backward sees them, by the names that they have there."""

    def __init__(self, module: Module) -> None:
        found = {arg.tensor.name: arg.tensor for arg in (*module.taken, *module.outputs, *module.kept)}
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
        tensor = self.by_name[name]
        names = (stride_name(tensor, axis) for axis in range(len(tensor.shape)))
        return [stride for stride in names if stride]

    def extra_strides(self, name: str, tensor: str) -> list[str]:
        rank = len(self.by_name[tensor].shape)
        return [f"stride_{name}_{axis}" for axis in range(rank)]
