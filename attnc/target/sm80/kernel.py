"""The text of a CUDA kernel that computes o, as parts that its templates name: rows in global memory, tiles
in shared memory, the loop over keys, what a step does, and in the end; of a decode kernel also its splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from attnc.expr.nodes import Dim, walk
from attnc.model.dtypes import DType
from attnc.plan.epilogue import list_lengths
from attnc.plan.ir import Arg, Decode, Forward, Let, Module, Statement, split_of, unified_of
from attnc.plan.sm80.layout import CudaLayout
from attnc.target.kernel_view import OutputView, sizes_of_kernel
from attnc.target.sm80.dropout import Drawing
from attnc.target.sm80.elements import FRAGMENT, Elements, only_element
from attnc.target.sm80.finish import Finish
from attnc.target.sm80.forms import FORMS, CudaFormText
from attnc.target.sm80.lists import CudaListsText
from attnc.target.sm80.loop import TileLoop, loop_of
from attnc.target.sm80.output_arguments import OutputArguments
from attnc.target.sm80.pack import HeadPack, QueryPack, pack_of
from attnc.target.sm80.printer import CudaWalk, scalar, sizes_of_call, statement
from attnc.target.sm80.rows import GlobalRows
from attnc.target.sm80.shared import Copiers, SharedTiles
from attnc.target.sm80.split import Split
from attnc.target.sm80.step import Step
from attnc.target.sm80.thread import ThreadRows

#: Sizes that a sequence may shorten.
_LENGTHS = ("M", "N")


class CudaText:
    """What `templates/cuda/*.jinja` print of one kernel. rows: in global memory; pack: what rows of a tile
    are; thread: those of a thread; tiles, copiers: in shared memory; step: what is computed of a tile of
    keys; finish: what becomes of o; split: of the keys, None where they are not split; lists: the kernel that
    makes them ready, if a mask lists blocks; segment: keys whose sums start from nothing, 0 where those of a
    row are one chain; sums_in_memory: those of all segments so far lie there, in a place of each block that
    runs.
    """

    module: Module
    kernel: Forward | Decode
    view: OutputView
    elements: Elements
    rows: GlobalRows
    pack: HeadPack
    tiles: SharedTiles
    copiers: Copiers
    loop: TileLoop
    dropout: Drawing
    thread: ThreadRows
    step: Step
    finish: Finish
    split: Split | None = None
    lists: CudaListsText | None
    segment: int
    sums_in_memory: bool
    _fragment = FRAGMENT
    _list_threads = "THREADS"
    _alone_type: type[HeadPack] = QueryPack

    def __init__(self, module: Module, kernel: Forward | Decode, layout: CudaLayout) -> None:
        self.module, self.kernel, self.layout = module, kernel, layout
        self.view = OutputView(module, kernel)
        self.dtypes = {
            arg.tensor.name: DType(arg.tensor.dtype) for arg in (*module.taken, *module.outputs, *module.kept)
        }
        by_warp = layout.warp_split == "kv" and layout.merge == "end"
        only = only_element(layout.element, module.variant)
        self.elements = Elements(is_f32=layout.is_f32, fragment=self._fragment, only=only)
        self.pack = pack_of(kernel, self._alone_type)
        self.rows = GlobalRows(
            kernel=kernel,
            view=self.view,
            dtypes=self.dtypes,
            pack=self.pack,
            page=self.view.rows("k").page,
            v_in_k=layout.v_in_k,
        )
        self.tiles = SharedTiles(
            layout=layout, page=self.rows.page, by_warp=by_warp, streams_values=kernel.grid.over == "q"
        )
        self.copiers = Copiers(by_warp=by_warp)
        self.loop = loop_of(kernel, self.dtypes)
        self.dropout = Drawing(kernel.softmax.dropout)
        self.default = kernel.configs[0]
        by_rows = layout.warp_split == "q"
        self.thread = ThreadRows(
            kernel=kernel,
            dtypes=self.dtypes,
            computed=(*kernel.program, *kernel.outer, *kernel.step.fetches, *kernel.step.masked_fetches),
            split=layout.warp_split,
            row="warp * WARP_M + 8 * r + g" if by_rows else "8 * r + g",
        )
        own, split = kernel.segments, split_of(kernel)
        self.segment = own.size if own else split.segment if split else 0
        self.sums_in_memory = own is not None
        self.step, self.finish = Step(kernel, self.dtypes), Finish(module, kernel, self.dtypes)
        self.unified = unified_of(kernel)
        self.lists = self._make_lists()

    def _make_lists(self) -> CudaListsText | None:
        made = self.module.lists
        return (
            None
            if made is None
            else CudaListsText(self.module, made, self.dtypes, threads=self._list_threads)
        )

    @cached_property
    def arguments(self) -> OutputArguments:
        by_head = self.kernel.grid.over == "head"
        sums = ["float *acc_ptr, *l_ptr, *m_ptr;"] if by_head else []
        return self._pass_arguments(workspaces=[*sums, *self._listed], sizes=sizes_of_kernel(self.kernel))

    @property
    def _listed(self) -> list[str]:
        return [] if self.lists is None else [f"int* {self.lists.result}_ptr;"]

    @property
    def _sums(self) -> list[str]:
        marks = ["int* counter_ptr;"] if isinstance(self.kernel, Decode) else []
        return ["float* _sums_ptr;", *marks] if self.sums_in_memory else []

    def _pass_arguments(
        self,
        *,
        sizes: list[str],
        workspaces: list[str],
        maps: tuple[str, ...] = (),
        boxes: tuple[str, ...] = (),
        more_strides: Sequence[Sequence[str]] = (),
    ) -> OutputArguments:
        """Returns the arguments of the kernel. maps: tensors that TMA copies or stores; boxes: those of them
        that nothing else reads, whose addresses are not passed.
        """
        every: tuple[Arg, ...] = (*self.module.taken, *self.module.outputs, *self.module.kept)
        tensors = [arg for arg in every if arg.tensor.name not in boxes]
        return OutputArguments(
            module=self.module,
            dtypes=self.dtypes,
            tensors=tensors,
            strides=[self.view.strides(arg) for arg in tensors],
            sizes=sizes,
            maps=maps,
            workspaces=workspaces,
            more_strides=more_strides,
        )

    @cached_property
    def form(self) -> CudaFormText:
        softmax = self.kernel.softmax
        return FORMS[softmax.form](
            kernel=self.kernel,
            thread=self.thread,
            times_scale=self.step.times_scale,
            in_segments=self.segment > 0,
        )

    # -- the tile at hand ----------------------------------------------------------------------------------

    @cached_property
    def walk(self) -> CudaWalk:
        return CudaWalk(walk=self.kernel.walk, of_call="")

    @property
    def tiles_of_grid(self) -> str:
        tiles = CudaWalk(walk=self.kernel.walk, of_call="args.").tiles
        return f"{tiles} * args.B * args.H" if self.kernel.grid.sequences is None else f"({tiles}) * args.H"

    @property
    def program(self) -> Iterator[str]:
        return self.declare(self.kernel.program)

    def declare(self, items: Iterable[Statement]) -> Iterator[str]:
        """Yields statements in front of the loops: a length is declared first, and assigned from then on."""
        declared = {*self.kernel.dims, *(["M"] if self.kernel.grid.sequences is not None else [])}
        for item in items:
            if isinstance(item, Let) and item.name in _LENGTHS and item.name not in declared:
                declared.add(item.name)
                yield f"int {item.name} = {scalar(item.value)};"
            else:
                yield statement(item, self.dtypes, tuple(declared))

    @property
    def sizes(self) -> Iterator[str]:
        shortened = {item.name for item in self.kernel.program if isinstance(item, Let)}
        by_head = self.kernel.grid.over == "head" and not any(
            Dim("B") in walk(expr) for expr in self.thread.expressions()
        )
        dims = [name for name in self.kernel.dims if not (name == "B" and by_head)]
        yield from sizes_of_call(name for name in dims if name not in shortened)
        yield from sizes_of_call((name for name in dims if name in shortened), "int")


class CudaDecodeText(CudaText):
    """What `templates/cuda/decode.cu.jinja` and `combine.cu.jinja` print besides. update, joins: what becomes
    of the scores of a tile, and in the end of what warps have summed.
    """

    kernel: Decode

    def __init__(self, module: Module, kernel: Decode, layout: CudaLayout) -> None:
        super().__init__(module, kernel, layout)
        if kernel.split is not None:
            self.split = Split(
                module,
                kernel,
                self._lengths,
                self.loop,
                columns=layout.split_columns,
                stored=self.rows.stored,
            )
            self.loop = replace(self.loop, end="split_hi")
        self.thread = replace(
            self.thread,
            tile="row_lo",
            group=self.pack.rows,
            heads=self.pack.alone,
            first_head=self.pack.first_head,
            is_split=kernel.split is not None,
            query=self.pack.query,
        )
        self.update = "q" if layout.warp_split == "q" or self.copiers.by_warp else "kv"
        self.joins = "rows" if layout.warp_split == "q" else "warps" if self.copiers.by_warp else "sums"

    @cached_property
    def arguments(self) -> OutputArguments:
        fallbacks = ["int* fallbacks_ptr;"] if self.unified and self.unified.fallback else []
        return self._pass_arguments(
            workspaces=[*self._split_results, *fallbacks, *self._listed], sizes=self._size_names
        )

    @property
    def _lengths(self) -> list[str]:
        return [*self.sizes, *self.declare(list_lengths(self.kernel))]

    @property
    def _split_results(self) -> list[str]:
        if self.split is None:
            return []
        statistics = ["float* lse_splits_ptr;"] if self.kernel.softmax.has_statistics else []
        return ["float* o_splits_ptr;", *statistics]

    @property
    def _size_names(self) -> list[str]:
        places = ["PLACES"] if self.sums_in_memory else []
        return [*self.kernel.dims, *([] if self.split is None else self.split.size_names), *places]
