"""Text of the kernel for gradients where every query selects single keys, or a few, and what queries give to
dk and dv is added in memory as it comes: attribute by attribute what
`templates/triton/selected_tokens.py.jinja` prints, and the declaration of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from attnc.expr.nodes import Const, Expr, show
from attnc.plan.ir import Loop, Module
from attnc.plan.ir.backward import BackwardKernel, Made
from attnc.plan.ir.kernel import DotPart
from attnc.plan.lists import PRODUCT_COLUMNS, PRODUCT_KEYS, PRODUCT_STAGES
from attnc.plan.signature import block
from attnc.target.declaration import CallText, declare_allocation
from attnc.target.terms import times
from attnc.target.triton.parameters import Pair
from attnc.target.triton.printer import scalar, unique
from attnc.target.triton.selected import SelectedParameters, SelectedText, SumText, whole_tiles_of_list

#: Warps that a multiprocessor has registers for.
_RESIDENT_WARPS = 8


class TokenParameters(SelectedParameters):
    """Parameters of a kernel whose programs take query after query, and add to sums in memory."""

    @property
    def _pointers(self) -> list[Pair]:
        own = ("_weights", "_sums", "_ticket")
        return [*super()._pointers, *((f"{name}_ptr", name) for name in own)]

    @property
    def _keeps(self) -> bool:
        return False  # of the query at hand alone

    @property
    def arguments(self) -> list[str]:
        return [", ".join(line) for line in (*self.lines, ["BLOCK_M", "BLOCK_N"])]

    @property
    def programs(self) -> str:
        return "programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductText:
    """Some columns of what a query gives to keys: a product of weights and rows over its heads.

    side: 0, of rows of do; 1, of q; sides: 2, of both, from 0 on; column: their first one; width: how many,
    as a function takes them; at: where the product is added; factor: of it.
    """

    side: int
    sides: int
    column: int
    width: str
    at: str
    factor: str


class TokenText(SelectedText):
    """Text of a kernel that makes dq of one query after the other, and adds to dk and dv of its keys."""

    parameters_type = TokenParameters
    parameters: TokenParameters
    #: Of a product: its keys, and tiles of weights that are on their way.
    keys, stages = PRODUCT_KEYS, PRODUCT_STAGES

    def __init__(self, module: Module, planned: BackwardKernel) -> None:
        super().__init__(module, planned)
        #: Numbers that a key has in memory: dk, and dv where that is no part of it.
        self.columns = self.tensors.d if planned.v_in_k else self.tensors.d + self.tensors.dv

    @property
    def added(self) -> str:
        return " and ".join(self.kernel.adds)

    def keys_of(self, loop: Loop) -> str:
        return f"tl.range(0, listed * {self.block}, BLOCK_N, disable_licm=True)"

    # -- products ------------------------------------------------------------------------------------------

    @property
    def _row_names(self) -> list[str]:
        sizes = [name for name in (self.group,) if name.isidentifier()]
        strides = [*self.tensors.strides("q"), *self.tensors.strides("do")]
        return unique(("Q", "DO", "b", "h_kv", "q_lo", *sizes, "M", *strides))

    @property
    def row_names(self) -> str:
        return ", ".join(self._row_names)

    @property
    def products(self) -> list[ProductText]:
        return [
            self._product(name, part, side, sides)
            for name in self.kernel.adds
            for part in _split(self._parts_of(name))
            for side, sides in self._sides_of(name, part)
        ]

    @property
    def rows_are_alike(self) -> bool:
        tensors = self.tensors.by_name
        return tensors["do"].dtype == tensors["q"].dtype

    def _sides_of(self, name: Made, part: DotPart) -> Sequence[tuple[int, int]]:
        """Returns from which side on a product has rows, and of how many sides: two products where rows of
        both are not alike.
        """
        if name == "dv":
            return [(0, 1)]
        if not (self.kernel.v_in_k and part.first < self.tensors.dv):
            return [(1, 1)]
        return [(0, 2)] if self.rows_are_alike else [(0, 1), (1, 1)]

    def _parts_of(self, name: Made) -> Sequence[DotPart]:
        tensors = self.tensors
        if name == "dv":
            return [DotPart(first=0, width=tensors.dv)]
        if not self.kernel.v_in_k:
            return [DotPart(first=0, width=tensors.d)]
        rest = tensors.d - tensors.dv
        behind = [DotPart(first=tensors.dv, width=rest)] if rest else []
        return [DotPart(first=0, width=tensors.dv), *behind]

    def _product(self, name: Made, part: DotPart, side: int, sides: int) -> ProductText:
        first = part.first + (self.tensors.d if name == "dv" else 0)
        columns = block(part.width)
        return ProductText(
            side=side,
            sides=sides,
            column=part.first,
            width=f"{part.width}, {columns}" if self.tensors.padded else str(columns),
            at=f"sums + {first}" if first else "sums",
            factor=scalar(Const(self.chain.scale)) if side + sides > 1 else "1.0",
        )


def _split(parts: Sequence[DotPart]) -> Iterator[DotPart]:
    for part in parts:
        stop = part.first + part.width
        for first in range(part.first, stop, PRODUCT_COLUMNS):
            yield DotPart(first=first, width=min(PRODUCT_COLUMNS, stop - first))


class TokenSumText(SumText):
    """Text of the kernel that makes gradients of the sums, of which there is one copy, and their memory."""

    def __init__(self, module: Module, tokens: TokenText) -> None:
        super().__init__(module, tokens, tokens.kernel.adds, tokens.block)
        self._tokens = tokens

    def memory_sizes(self, entries: Expr) -> Mapping[str, str]:
        """Returns copies of the sums, programs that add to them, and weights of the queries that these have
        at hand. entries: of a list.
        """
        config, group = self._tokens.kernel.config, self._tokens.group
        resident = f"multiprocessors() * max({_RESIDENT_WARPS} // {config}.num_warps, 1)"
        rows = f"2 * cdiv({group}, {config}.BLOCK_M) * {config}.BLOCK_M"
        keys = whole_tiles_of_list(show(entries), self.block)
        return {
            "copies": "1",
            "programs": f"min({times('M * B', self.kv_heads)}, {resident})",
            "weights": f"programs * {rows} * {keys}",
        }

    def list_allocations(self) -> Iterator[CallText]:
        """Yields the sums, the weights, and how many queries have been begun."""
        numbers = times("B", self.kv_heads, "N", self.columns)
        yield declare_allocation("_sums", f"f32[max({numbers}, 1)]", zero=True)
        dtype = self._tokens.module.variant.attention.q.dtype
        yield declare_allocation("_weights", f"{dtype}[max(weights, 1)]")
        yield declare_allocation("_ticket", "i32[1]", zero=True)
