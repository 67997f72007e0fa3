"""The pieces of a CUDA backward kernel's text that its template places: the file around it, where rows lie,
which tile is a block's, its loops, scores and sums; and of the small kernels before and after them, for
the rows and for the rounding of dq.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from attnc.expr.nodes import TRUE, And, Const, Index, Or, walk
from attnc.model.tensors import Role
from attnc.plan.ir import Let, Module, Statement
from attnc.plan.ir.backward import BackwardKernel, Preprocess
from attnc.plan.signature import RowZero
from attnc.plan.sm80 import backward_layout_of
from attnc.target.header import ROW_NUMBERS, Number, score_numbers
from attnc.target.kernel_view import BY_QUERY, BackwardView
from attnc.target.printer import IN_ROWS
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.dropout import Drawing
from attnc.target.sm80.elements import FRAGMENT, Elements, only_element
from attnc.target.sm80.loads import Loads
from attnc.target.sm80.loop import TileLoop
from attnc.target.sm80.printer import (
    CudaSums,
    CudaSumsOfWeights,
    CudaWalk,
    address,
    at_key,
    at_row,
    offset,
    scalar,
    sizes_of_call,
    statement,
)
from attnc.target.sm80.shared import SharedTiles

# --- a file for each kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBuild:
    """What a kernel is compiled with: rows and keys of its tiles, warps, tiles that are copied ahead."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def default_of(planned: BackwardKernel) -> KernelBuild:
    """Returns the first config of a kernel."""
    config = planned.configs[0]
    sizes = config.tile_q, config.tile_kv, config.warps, config.stages
    return KernelBuild(**dict(zip(("block_m", "block_n", "warps", "stages"), sizes, strict=True)))


class CudaFileText:
    """What every `.cu` file of a backward begins with."""

    #: What `_device.cu.jinja` asks: whether a unified maximum falls back.
    finds_top = False
    page = 0
    bounds = "__launch_bounds__(THREADS)"
    makes_tiles = False
    #: Whether several blocks share the columns of a gradient.
    sliced = False
    #: The template of how warps share tiles.
    sizes_from = ""
    turns_columns = False
    _fragment = FRAGMENT
    elements: Elements
    tiles: SharedTiles
    numbers: tuple[Number, ...] = ()

    def __init__(self, module: Module, arguments: ArgumentText, name: str, default: KernelBuild) -> None:
        assert module.backward is not None
        self.module, self.arguments, self.name, self.launch = module, arguments, name, default
        self.plan = backward_layout_of(module.backward)
        self.layout = self.plan.layout
        self.elements = Elements(
            is_f32=self.layout.is_f32,
            products_of="backward_",
            fragment=self._fragment,
            only=only_element(self.layout.element, module.variant),
        )
        self.tiles = SharedTiles(layout=self.layout)
        self.dtypes = arguments.dtypes
        self.places = BackwardPlaces(arguments)

    @property
    def constants(self) -> Iterator[str]:
        yield from ()


# --- where rows lie


class BackwardPlaces:
    """Where rows lie in the kernels of a backward.

    Kernels copy lse2 and delta 16 bytes at a time, and past the end of a sequence. So packed sequences have
    padded rows there: those of sequence b begin at row (cu_seqlens[b] / ROW_TILE + b) * ROW_TILE of their
    head, with ROW_TILE the most rows of a q tile of any kernel: the numbering of q tiles of that height
    (`access.Sequences`), in rows.
    """

    def __init__(self, arguments: ArgumentText) -> None:
        self._tensors = arguments.tensors
        self.packs_queries = self._tensors.packs(Role.QUERY)

    def offset(self, name: str, head: str) -> str:
        """Returns the offset from the first element of a tensor or its gradient to row 0 of the head and
        sequence at hand.
        """
        return offset(self._tensors.row_zero(name, head))

    def first_row(self, sequence: str) -> str:
        """Returns row 0 of the head and sequence at hand in lse2 and delta; sequence: its number, if
        packed.
        """
        if self.packs_queries:
            first = f"(q_first / args.ROW_TILE + {sequence}) * args.ROW_TILE"
            return f"(long long)h * args.M_padded + {first}"
        return "(long long)(b * H + h) * args.M_padded"


# --- a kernel of gradients


class CudaBackwardText(CudaFileText):
    """Text of one kernel; attribute by attribute what `templates/cuda/backward_d*.cu.jinja` print."""

    kernel: BackwardKernel
    makes_tiles = True
    sizes_from = "cuda/_backward_sizes.cu.jinja"
    loop: TileLoop
    dropout: Drawing
    loads: Loads
    _loads_type: ClassVar[type[Loads]] = Loads

    def __init__(self, module: Module, arguments: ArgumentText, planned: BackwardKernel) -> None:
        super().__init__(module, arguments, planned.name, default_of(planned))
        self.kernel = planned
        self.bounds = "BOUNDS" if planned.limits_registers else self.bounds
        self.over_q, self.groups = planned.over_q, planned.sums_heads
        self.show = at_row if self.over_q else at_key
        self.kv_name = "h" if self.kernel.kv_head == Index("h") else "h_kv"
        starts = self.kv_name == "h" or planned.fills_keys
        self.view = BackwardView(module, planned, starts_with_program=starts)
        self.is_sequential = self.kernel.grid.over == "head"
        self.loop = TileLoop(kernel=planned, dtypes=self.dtypes, fills=self.over_q or planned.fills_keys)
        self.dropout = Drawing(planned.softmax.dropout)
        self.chain, self.makes = planned.chain, planned.makes
        self.as_elements = arguments.as_elements
        # dq += ds k: ds lies in shared memory, keys as rows
        self.turns_columns = self.chain.adds_dq is not None and not self.over_q
        self.numbers = tuple(score_numbers(self.kernel))
        self.exchange = self.plan.exchange and not self.over_q
        self.sliced = self.plan.sliced
        self.by_row = "[r]" if self.over_q else ""
        self.first_query = "first_query" if self.exchange else "0"
        self.first_column = "first_query + " if self.exchange else ""
        self.loads = self._loads_type(
            planned, self.dtypes, mode=self.mode, show=self.show, statement=self.statement
        )
        sums = CudaSums if planned.softmax.normalises else CudaSumsOfWeights
        self.sums = sums(
            adjoints=self.chain.adjoints,
            over_q=self.over_q,
            show=self.show,
            of_keys=tuple(fetch for fetch in self.loads.fetches if fetch.axes == ("kv",)),
            dtypes=self.dtypes,
        )
        self.uses_q_pos = planned.uses("q_pos")
        has_adjoints, drops = bool(self.chain.adjoints), self.kernel.softmax.dropout is not None
        self.needs_q_idx = has_adjoints or self.uses_q_pos or planned.uses("q_idx")
        self.needs_kv_idx = has_adjoints or drops or planned.uses("kv_idx")

    # -- which tile is a block's -----------------------------------------------------------------------

    def statement(self, item: Statement) -> str:
        if item in self._first_lengths:
            assert isinstance(item, Let)
            return f"int {item.name} = {scalar(item.value)};"
        return statement(item, self.dtypes, ("M", "N"), self.show)

    @property
    def _first_lengths(self) -> tuple[Statement, ...]:
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

    def row_zero(self, name: str) -> RowZero:
        """Returns where row 0 of a matrix or gradient lies, of the head and sequence at hand."""
        head = "h" if name in BY_QUERY else "" if self.kernel.kv_head == Const(0) else self.kv_name
        return self.arguments.tensors.row_zero(name, head)

    def head_offset(self, name: str) -> str:
        """Returns the offset from the first element of a matrix to the rows of the head and sequence at
        hand.
        """
        return offset(self.row_zero(name))

    @property
    def first_row(self) -> str:
        return self.places.first_row("sequence" if self.over_q else "b")

    @cached_property
    def walk(self) -> CudaWalk:
        section = "SECTION" if self.over_q else "KV_SECTION"
        return CudaWalk(walk=self.kernel.walk, of_call="args.", section=section)

    # -- its loops and sums ------------------------------------------------------------------------------

    @property
    def times_scale(self) -> str:
        return "" if self.kernel.softmax.scale is None else " * SCALE"

    @property
    def stores_sums(self) -> bool:
        return not self.over_q and not {"dk", "dv"} <= set(self.as_elements)

    @property
    def shows_left(self) -> bool:
        return self.exchange or self.turns_columns

    # -- expressions ---------------------------------------------------------------------------------------

    @property
    def slope(self) -> str:
        assert self.chain.slope is not None
        return self.sums.factor(self.chain.slope)

    @property
    def score_name(self) -> str:
        return "s" if self.kernel.step.score is None else "score"

    @property
    def keep_text(self) -> str:
        assert self.kernel.step.keep is not None
        return self.show(self.kernel.step.keep)

    @property
    def keep(self) -> str:
        assert self.kernel.step.keep is not None
        joins = any(isinstance(node, And | Or) for node in walk(self.kernel.step.keep))
        return f"({self.keep_text})" if joins else self.keep_text

    @property
    def clears_ds(self) -> bool:
        return not self.over_q and self.kernel.step.kept is not None and not self.kernel.fills_keys

    @property
    def is_kept(self) -> str:
        return (
            "kept[r] >> (2 * j + c) & 1"
            if self.over_q
            else "kept[r / 2][j / 8] >> (4 * j % 32 + 2 * c + r % 2) & 1"
        )

    @property
    def in_rows(self) -> str:
        return self.show(IN_ROWS)

    @property
    def times_factor(self) -> str:
        """What sums are multiplied by at the end, besides a constant: the factor of a weight."""
        return "" if self.chain.factor is None else f" * ({scalar(self.chain.factor)})"

    def scale_of(self, name: str) -> str:
        scale = 1.0 if name == "dv" else self.chain.scale
        if scale == 1.0 and self.times_factor:
            return self.times_factor.removeprefix(" * ")
        return scalar(Const(scale)) + self.times_factor

    # -- the frame -----------------------------------------------------------------------------------------

    @property
    def paper(self) -> str:
        return f"FlashAttention-{'1, algorithm 4' if self.is_sequential else '2, algorithm 2'}"

    @property
    def what(self) -> str:
        names = dict.fromkeys(f"d{adjoint.load.tensor}" for adjoint in self.chain.adjoints)
        own = (*(("dq",) if self.chain.adds_dq else ()), *self.makes, *names)
        return " and ".join(filter(None, (", ".join(own[:-1]), *own[-1:])))

    @property
    def mode(self) -> str:
        """Where the mask is tested: "never", "always", in partial tiles "after" everything else, or, where
        sums need it earlier, for "each" element.
        """
        if self.kernel.step.keep is None:
            return "never"
        known = {"true": "always", "false": "never"}.get(self.loop.masked)
        return known or ("each" if self.chain.adjoints else "after")


#: Eight threads share a row, so that 4 warps take 16 rows at a time: every tile is a multiple.
ROWS_WARPS = 4


def finish_name(module: Module) -> str:
    """Returns the function that rounds dq."""
    return f"{module.variant.attention.name}_backward_finish"


class RowsText(CudaFileText):
    """Text of the kernel that makes delta and the base-2 lse: what `backward_preprocess.cu.jinja` prints.

    turns: of the q tile, where blocks add to dq by turns: numbers that it sets to 0; clears: whether it sets
    the sums of the q tile to 0.
    """

    numbers = ROW_NUMBERS
    turns = ""
    clears = False

    def __init__(self, module: Module, arguments: ArgumentText, planned: Preprocess) -> None:
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
        sequences = self.planned.sequences
        yield f"const int q_tiles = args.M_padded / {self.rows_of_tile};"
        if sequences is None:
            yield (
                "const int b = blockIdx.x / q_tiles / H, h = blockIdx.x / q_tiles % H, "
                "q_lo = blockIdx.x % q_tiles * BLOCK_M;"
            )
        else:
            yield "const int h = blockIdx.x / q_tiles, number = blockIdx.x % q_tiles;"
            yield from CudaWalk(walk=self.planned.walk, of_call="args.").find_sequence(
                sequences, self.rows_of_tile
            )

    @property
    def rows_of_tile(self) -> str:
        """Rows of a block of threads: padded rows of packed sequences are all written."""
        return "BLOCK_M" if self.planned.sequences is None else "args.ROW_TILE"

    @property
    def sink_ends(self) -> Iterator[str]:
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

    sizes_from = "cuda/_dq_sizes.cu.jinja"

    def __init__(self, module: Module, arguments: ArgumentText) -> None:
        assert module.backward is not None
        last = default_of(module.backward.kernels[-1])
        super().__init__(module, arguments, finish_name(module), last)
        padded = f", D_TILE = {self.layout.qk.width}" if self.layout.is_padded else ""
        self.width = f"D = {self.layout.d}{padded}"
        self.scale = scalar(Const(module.backward.kernels[0].chain.scale))
