"""Which tile is a block's, in a CUDA backward kernel, and where the rows of its sequence lie, as text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from attnc.expr.nodes import Const, Index
from attnc.plan.ir import Let, Module, Statement
from attnc.plan.ir.backward import BackwardKernel
from attnc.target.locals import sizes_of_call
from attnc.target.sm80.arguments import Arguments
from attnc.target.sm80.backward_file import CudaFileText, default_of
from attnc.target.sm80.printer import at_key, at_row, scalar, statement
from attnc.target.sm80.walk import CudaWalk
from attnc.target.tensors import BY_QUERY


class CudaTileText(CudaFileText):
    """Attribute by attribute what `templates/cuda/backward_d*.cu.jinja` print before the loops."""

    kernel: BackwardKernel

    makes_tiles = True

    def __init__(self, module: Module, arguments: Arguments, planned: BackwardKernel) -> None:
        super().__init__(module, arguments, planned.name, default_of(planned))
        self.kernel = planned
        self.bounds = "BOUNDS" if planned.limits_registers else self.bounds
        self.over_q, self.groups = planned.over_q, planned.sums_heads
        self.show = at_row if self.over_q else at_key
        self.kv_name = "h" if self.kernel.kv_head == Index("h") else "h_kv"
        self.h_kv = scalar(self.kernel.kv_head)
        self.is_sequential = self.kernel.grid.over == "head"

    def statement(self, item: Statement) -> str:
        if item in self._first_lengths:
            assert isinstance(item, Let)
            return f"int {item.name} = {scalar(item.value)};"
        return statement(item, self.dtypes, ("M", "N"), self.show)

    @property
    def _first_lengths(self) -> tuple[Statement, ...]:
        """Statements that tell M or N of a packed sequence, before anything shortens it."""
        lengths = [item for item in self.kernel.program if isinstance(item, Let)]
        told = {"M", "N"} & set(self.kernel.dims)
        if self.kernel.grid.sequences is not None:  # the tile at hand tells it
            told.add("M" if self.over_q else "N")
        found = (
            next((x for x in lengths if x.name == name), None) for name in ("M", "N") if name not in told
        )
        return tuple(item for item in found if item is not None)

    @property
    def sizes(self) -> Iterator[str]:
        """`const int M = args.M;`: sizes by their names, but for those that a `length` shortens."""
        yield from sizes_of_call(name for name in self.kernel.dims if name not in self._shortened)

    @property
    def shortened_sizes(self) -> Iterator[str]:
        """`int N = args.N;`: what they are before that."""
        yield from sizes_of_call((name for name in self.kernel.dims if name in self._shortened), "int")

    @property
    def _shortened(self) -> set[str]:
        return {item.name for item in self.kernel.program if isinstance(item, Let)}

    def head_offset(self, name: str) -> str:
        """From the first element of a matrix to the rows of the head and sequence at hand."""
        head = "h" if name in BY_QUERY else "" if self.kernel.kv_head == Const(0) else self.kv_name
        return self.places.offset(name, head)

    @property
    def first_row(self) -> str:
        """Where the head's rows begin in lse2 and delta."""
        return self.places.first_row("sequence" if self.over_q else "b")

    @cached_property
    def walk(self) -> CudaWalk:
        """From the number of a tile to its place."""
        section = "SECTION" if self.over_q else "KV_SECTION"
        return CudaWalk(walk=self.kernel.walk, of_call="args.", section=section)
