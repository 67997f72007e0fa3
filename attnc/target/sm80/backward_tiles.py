"""Which tile is a block's, in a CUDA backward kernel, and where the rows of its sequence lie, as text."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import Const, Index
from attnc.plan.ir import Let, Module, Statement
from attnc.plan.ir.backward import BackwardKernel
from attnc.target.locals import sizes_of_call
from attnc.target.sm80.arguments import Arguments
from attnc.target.sm80.backward_file import CudaFileText, default_of
from attnc.target.sm80.backward_places import kv_tile_of, q_tile_of
from attnc.target.sm80.printer import at_key, at_row, scalar, statement
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
        self.kv_heads = "Hkv" if self.groups else "H"
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

    @property
    def q_tiles(self) -> str:
        """How many q tiles a head has, over all sequences if they are packed."""
        return "args.M_padded / BLOCK_M" if self._rows is None else f"{self._rows} / BLOCK_M + args.B + 1"

    @property
    def kv_tiles(self) -> str:
        """The same of kv tiles."""
        return (
            "(args.N + BLOCK_N - 1) / BLOCK_N"
            if self._rows is None
            else f"{self._rows} / BLOCK_N + args.B + 1"
        )

    @property
    def _rows(self) -> str | None:
        sequences = self.kernel.grid.sequences
        return None if sequences is None else f"args.{scalar(sequences.rows)}"

    @property
    def all_heads(self) -> str:
        """Heads that have tiles of their own: those of all sequences, unless they are packed."""
        heads = "H" if self.over_q else self.kv_heads
        return heads if self.kernel.grid.sequences is not None else f"B * {heads}"

    @property
    def place_of_q_tile(self) -> Iterator[str]:
        """From `rank` among the tiles of a section to b, h and q_lo, and to M of packed sequences."""
        last_first, sequences = self.kernel.grid.longest_first, self.kernel.grid.sequences
        if sequences is not None:
            yield "const int h = first_head + rank % heads, number = rank / heads;"
            yield from q_tile_of(sequences, "BLOCK_M", last_first=last_first)
            return
        tile = "(q_tiles - 1 - rank / heads)" if last_first else "rank / heads"
        yield f"const int q_lo = {tile} * BLOCK_M;"
        yield "const int b = (first_head + rank % heads) / H, h = (first_head + rank % heads) % H;"

    @property
    def place_of_kv_tile(self) -> Iterator[str]:
        """The same to b, h or h_kv and kv_lo, and to N of packed sequences."""
        heads, head, sequences = self.kv_heads, self.kv_name, self.kernel.grid.sequences
        if sequences is not None:
            yield f"const int {head} = first_head + rank % heads, number = rank / heads;"
            yield from kv_tile_of(sequences, "BLOCK_N")
            return
        number = "first_head + rank % heads"
        yield "const int kv_lo = rank / heads * BLOCK_N;"
        yield f"const int b = ({number}) / {heads}, {head} = ({number}) % {heads};"
