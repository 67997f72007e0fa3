"""Text of the small CUDA kernels of a backward: the rows before the others, and the rounding of dq after
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnc.expr.nodes import TRUE, Const
from attnc.plan.ir import Module, Statement
from attnc.plan.ir.backward import Preprocess
from attnc.target.locals import sizes_of_call
from attnc.target.numbers import ROW_NUMBERS
from attnc.target.sm80.arguments import Arguments
from attnc.target.sm80.backward import CudaFileText, default_of
from attnc.target.sm80.printer import address, scalar, statement
from attnc.target.sm80.walk import CudaWalk

#: Eight threads share a row, so that 4 warps take 16 rows at a time: every tile is a multiple.
ROWS_WARPS = 4


def finish_name(module: Module) -> str:
    """The function that rounds dq."""
    return f"{module.variant.attention.name}_backward_finish"


class RowsText(CudaFileText):
    """Text of the kernel that makes delta and the base-2 lse: what `backward_preprocess.cu.jinja` prints.

    turns: of the q tile, where blocks add to dq by turns: numbers that it sets to 0; clears: whether it sets
    the sums of the q tile to 0.
    """

    numbers = ROW_NUMBERS
    turns = ""
    clears = False

    def __init__(self, module: Module, arguments: Arguments, planned: Preprocess) -> None:
        assert module.backward is not None
        first = default_of(module.backward.kernels[0])
        super().__init__(module, arguments, planned.name, replace(first, warps=ROWS_WARPS, stages=1))
        self.planned = planned
        self.program = planned.program
        self.has_dlse = arguments.has_dlse
        self.width = f"DV = {self.layout.dv}"
        sink = planned.prologue.sink
        self.sink = "" if sink is None else scalar(sink)

    def statement(self, item: Statement) -> str:
        return statement(item, self.dtypes, ())

    @property
    def sizes(self) -> Iterator[str]:
        sequences = self.planned.sequences
        total = () if sequences is None else (scalar(sequences.rows),)
        others = {"N", *self.planned.dims} - {"B", "M", "H", *total}
        yield from sizes_of_call([*(["H", "M"] if sequences is None else []), *sorted(others)])

    @property
    def place(self) -> Iterator[str]:
        """From the block's number to b, h and q_lo, and to M of packed sequences."""
        sequences = self.planned.sequences
        yield f"const int q_tiles = args.M_padded / {self.rows_of_tile};"
        if sequences is None:
            yield (
                "const int b = blockIdx.x / q_tiles / H, h = blockIdx.x / q_tiles % H, "
                "q_lo = blockIdx.x % q_tiles * BLOCK_M;"
            )
        else:
            yield "const int h = blockIdx.x / q_tiles, number = blockIdx.x % q_tiles;"
            yield from CudaWalk(walk=self.planned.walk, of_call="args.").of_sequence(
                sequences, self.rows_of_tile
            )

    @property
    def rows_of_tile(self) -> str:
        """Rows of a block of threads: padded rows of packed sequences are all written."""
        return "BLOCK_M" if self.planned.sequences is None else "args.ROW_TILE"

    @property
    def sink_ends(self) -> Iterator[str]:
        """The gradients of what the sink loads, from that of the sink itself."""
        for adjoint in self.planned.prologue.adjoints:
            value = "dsink_row" if adjoint.value == Const(1.0) else f"dsink_row * ({scalar(adjoint.value)})"
            if adjoint.accumulate == "two_pass":
                yield f"args.{adjoint.name}_ptr[blockIdx.x] = {value};"
            else:
                at = address(f"args.{adjoint.name}_ptr", adjoint.name, adjoint.load.indices, scalar)
                if adjoint.guard != TRUE:
                    yield f"if ({scalar(adjoint.guard)})"
                yield f"{'' if adjoint.guard == TRUE else '    '}atomic_add(&{at}, {value});"


class FinishText(CudaFileText):
    """Text of the kernel that rounds dq: what `backward_finish.cu.jinja` prints."""

    def __init__(self, module: Module, arguments: Arguments) -> None:
        assert module.backward is not None
        last = default_of(module.backward.kernels[-1])
        super().__init__(module, arguments, finish_name(module), last)
        padded = f", D_TILE = {self.layout.qk.width}" if self.padded else ""
        self.width = f"D = {self.layout.d}{padded}"
        scale = module.backward.kernels[0].chain.scale
        self.scale = f"{scale!r}f"

    @property
    def constants(self) -> Iterator[str]:
        return self.dq_constants
