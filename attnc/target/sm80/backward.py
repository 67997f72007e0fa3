"""The pieces of a CUDA backward kernel's text that its template places: the file around it, where rows lie,
which tile is a block's, its loops, scores and sums; and of the small kernels before and after them, for
the rows and for the rounding of dq.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from attnc.expr.nodes import TRUE, Const
from attnc.model.attention import Attention
from attnc.model.tensors import Role
from attnc.plan.ir import Axis, Let, Module, Statement
from attnc.plan.ir.backward import BackwardKernel, Preprocess
from attnc.plan.sm80 import backward_layout_of
from attnc.plan.steps import sequences
from attnc.target.header import ROW_NUMBERS, Number, score_numbers
from attnc.target.kernel_view import BackwardView, name_gradients
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward_forms import BACKWARD_FORMS, CudaBackwardFormText
from attnc.target.sm80.backward_rows import BackwardPlaces, BackwardRows
from attnc.target.sm80.backward_step import Factors, KeyGradient, MaskTest, WarpShare
from attnc.target.sm80.dropout import Drawing
from attnc.target.sm80.elements import FRAGMENT, Elements, only_element
from attnc.target.sm80.loads import Loads
from attnc.target.sm80.loop import TileLoop, loop_of
from attnc.target.sm80.printer import (
    CudaSums,
    CudaSumsOfWeights,
    CudaWalk,
    address,
    at_key,
    at_row,
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

    bounds = "__launch_bounds__(THREADS)"
    makes_tiles = False
    #: The template of how warps share tiles.
    sizes_from = ""
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
            fragment=self._fragment,
            only=only_element(self.layout.element, module.variant),
        )
        self.tiles = SharedTiles(layout=self.layout)
        self.dtypes = arguments.dtypes
        self.places = BackwardPlaces(arguments.tensors)

    @property
    def constants(self) -> Iterator[str]:
        yield from ()


# --- a kernel of gradients


class BackwardSizes:
    """The sizes of a call that a kernel reads. found: names of those that it finds for each tile."""

    def __init__(self, kernel: BackwardKernel, found: Collection[str] = ()) -> None:
        self._dims, self._found = kernel.dims, found
        self._shortened = {item.name for item in kernel.program if isinstance(item, Let)}

    @property
    def fixed(self) -> Iterator[str]:
        """`const int M = args.M;`: sizes by their names, but for those that a `length` shortens."""
        yield from sizes_of_call(name for name in self._dims if name not in self._shortened)

    @property
    def shortened(self) -> Iterator[str]:
        yield from sizes_of_call((name for name in self._dims if name in self._shortened), "int")

    @property
    def read(self) -> Iterator[str]:
        yield from sizes_of_call(name for name in self._dims if name not in self._found)


class CudaBackwardText(CudaFileText):
    """What `templates/cuda/backward_d*.cu.jinja` print of one kernel. rows: in global memory; warps: how they
    share a tile; mask: its test; factors: of scores and sums; sums: of gradients besides dq, dk and dv.
    """

    kernel: BackwardKernel
    makes_tiles = True
    loop: TileLoop
    dropout: Drawing
    loads: Loads

    def __init__(self, module: Module, arguments: ArgumentText, planned: BackwardKernel) -> None:
        super().__init__(module, arguments, planned.name, default_of(planned))
        self.kernel = planned
        self.bounds = "BOUNDS" if planned.limits_registers else self.bounds
        self._show = at_row if planned.over_q else at_key
        self.rows = BackwardRows(arguments.tensors, planned)
        starts = self.rows.kv_name == "h" or planned.fills_keys
        self.view = BackwardView(module, planned, starts_with_program=starts)
        fills = planned.over_q or planned.fills_keys
        self.loop = loop_of(planned, self.dtypes, fills=fills)
        self.dropout, self.chain = Drawing(planned.softmax.dropout), planned.chain
        # dq += ds k: ds lies in shared memory, keys as rows
        turns = self.chain.adds_dq is not None and not planned.over_q
        self.warps = WarpShare(
            exchange=self.plan.exchange and not planned.over_q,
            turns_columns=turns,
            spreads=self.layout.v_in_k,
            sliced=self.plan.sliced,
            over_q=planned.over_q,
        )
        self.numbers = tuple(score_numbers(planned))
        self.mask = MaskTest(planned, self._show, self.loop.masked)
        self.loads = self._make_loads()
        self.sizes = BackwardSizes(planned)
        sums = CudaSums if planned.softmax.normalises else CudaSumsOfWeights
        self.sums = sums(
            adjoints=self.chain.adjoints,
            over_q=planned.over_q,
            show=self._show,
            of_keys=tuple(fetch for fetch in self.loads.fetches if fetch.axes == ("kv",)),
            dtypes=self.dtypes,
        )
        self.factors = Factors(planned, self.sums)

    @property
    def sizes_from(self) -> str:  # type: ignore[override]  # computed here
        return self.warps.sizes_from

    @property
    def results(self) -> list[KeyGradient]:
        """Gradients over keys that the kernel makes."""
        made = (("dk", "D", "k_tile", self.tiles.d), ("dv", "DV", "v_tile", self.tiles.dv))
        return [
            KeyGradient(
                name=name,
                size=size,
                head=self.rows.head_offset(name),
                tile=tile,
                width=width,
                factor=self.factors.of(name),
                is_rounded=name in self.arguments.as_elements,
                warps=self.warps,
            )
            for name, size, tile, width in made[: len(self.kernel.makes)]
        ]

    @cached_property
    def form(self) -> CudaBackwardFormText:
        return BACKWARD_FORMS[self.kernel.softmax.form](
            kernel=self.kernel, mask=self.mask, factors=self.factors, clears_rows=self.view.clears_rows
        )

    def _make_loads(self) -> Loads:
        return Loads(self.kernel, self.dtypes, mode=self.mask.mode, show=self._show, statement=self.statement)

    def statement(self, item: Statement) -> str:
        if item in self._first_lengths:
            assert isinstance(item, Let)
            return f"int {item.name} = {scalar(item.value)};"
        return statement(item, self.dtypes, ("M", "N"), self._show)

    @property
    def _first_lengths(self) -> tuple[Statement, ...]:
        lengths = [item for item in self.kernel.program if isinstance(item, Let)]
        told = {"M", "N"} & set(self.kernel.dims)
        if self.kernel.grid.sequences is not None:  # the tile at hand tells it
            told.add("M" if self.kernel.over_q else "N")
        found = (
            next((x for x in lengths if x.name == name), None) for name in ("M", "N") if name not in told
        )
        return tuple(item for item in found if item is not None)

    @cached_property
    def walk(self) -> CudaWalk:
        section = "SECTION" if self.kernel.over_q else "KV_SECTION"
        of_key = " / G" if self.kernel.sums_heads else ""
        in_rounds = of_key if self.kernel.kept is not None or self.kernel.takes_ds else None
        return CudaWalk(walk=self.kernel.walk, of_call="args.", section=section, in_rounds=in_rounds)

    @property
    def what(self) -> str:
        added = ("dq",) if self.chain.adds_dq else ()
        return name_gradients((*added, *self.kernel.makes), self.chain)


#: Eight threads share a row, so that 4 warps take 16 rows at a time: every tile is a multiple.
ROWS_WARPS = 4


def list_cleared(module: Module) -> list[str]:
    """Lists the inputs whose gradients the kernel for rows clears behind the last packed sequence, so that
    the host has nothing to clear: where rows come first in memory, and no length shortens a sequence.
    """
    backward, attention = module.backward, module.variant.attention
    if backward is None or backward.preprocess is None or attention.lengths:
        return []
    rows = {x.name: x for x in (attention.q, attention.k, attention.v) if x.storage.is_packed}
    found = [name for name in attention.grads if name in rows]
    return found if all(rows[name].roles[0] in (Role.QUERY, Role.KEY) for name in found) else []


def _find_behind(attention: Attention, axis: Axis) -> tuple[str, str]:
    packed = sequences(attention, axis)
    assert packed is not None
    cu = packed.cu_seqlens
    return f"args.{cu}_ptr[args.B * args.stride_{cu}_0]", f"args.{scalar(packed.rows)}"


def finish_name(module: Module) -> str:
    """Returns the function that rounds dq."""
    return f"{module.variant.attention.name}_backward_finish"


class RowsText(CudaFileText):
    """Text of the kernel that makes delta and the base-2 lse: what `backward_preprocess.cu.jinja` prints.

    turns: of the q tile, where blocks add to dq by turns: numbers that it sets to 0; clears: whether it sets
    the sums of the q tile to 0; cleared: statements that clear gradients behind the last packed sequence.
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
        cleared = list(map(self._clear, list_cleared(module)))
        self.cleared = ["// Rows behind the last sequence belong to none.", *cleared] if cleared else []

    def statement(self, item: Statement) -> str:
        return statement(item, self.dtypes, ())

    def _clear(self, name: str) -> str:
        attention, tensors = self.module.variant.attention, self.arguments.tensors
        tensor = attention.q if name == "q" else tensors.by_name[name]
        heads = tensor.size(Role.HEAD) if Role.HEAD in tensor.roles else Const(1)
        count = (
            scalar(heads)
            if isinstance(heads, Const)
            else "args.H"
            if name == "q"
            else f"args.{scalar(heads)}"
        )
        begins, rows = _find_behind(attention, "q" if name == "q" else "kv")
        return f"clear_rows(args.d{name}_ptr, {begins}, {rows}, {count}, {scalar(tensor.shape[-1])});"

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


#: Warps of the kernel that adds sums of parts, and blocks for each multiprocessor at most.
ADD_WARPS, ADD_BLOCKS = 4, 8


def add_name(module: Module) -> str:
    """Returns the function that adds dk and dv of the blocks that share query heads."""
    return f"{module.variant.attention.name}_backward_add"


class JoinText(CudaFileText):
    """Text of a kernel that adds dk or dv of blocks that share a walk. makes: those that it adds."""

    def __init__(
        self, module: Module, arguments: ArgumentText, name: str, default: KernelBuild, summed: Sequence[str]
    ) -> None:
        super().__init__(module, arguments, name, default)
        self.makes = [name.removesuffix("_sum") for name in summed]
        widths = {"dk": f"D = {self.layout.d}", "dv": f"DV = {self.layout.dv}"}
        self.width = ", ".join(widths[name] for name in self.makes)

    @property
    def key_rows(self) -> str:
        if not {"k", "v"}.intersection(list_cleared(self.module)):
            return "args.KEY_ROWS"
        begins, rows = _find_behind(self.module.variant.attention, "kv")
        return f"args.KEY_ROWS / {rows} * {begins}"


class AddText(JoinText):
    def __init__(self, module: Module, arguments: ArgumentText) -> None:
        assert module.backward is not None
        last = default_of(module.backward.kernels[-1])
        own = replace(last, warps=ADD_WARPS, stages=1)
        super().__init__(module, arguments, add_name(module), own, arguments.parts)
