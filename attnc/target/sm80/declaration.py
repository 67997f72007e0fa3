"""The declaration of a CUDA module's call, as `attnc.support.cuda_call.CudaAttention` takes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from attnc.expr.nodes import show
from attnc.model.tensors import Role
from attnc.plan.access import Section
from attnc.plan.ir import Decode, Forward, Module
from attnc.plan.ir.backward import BackwardKernel, Rounds
from attnc.plan.signature import longest
from attnc.plan.sm80 import backward_layout_of
from attnc.target.declaration import (
    BackwardDeclaration,
    CallText,
    Items,
    Table,
    Value,
    add_scratch,
    attention_fields,
    copies_of,
    declare_allocation,
    in_words,
    quote_word,
    section,
    show_size,
    split_record,
    tiles,
    width_of_split,
)
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward import (
    ADD_BLOCKS,
    ADD_WARPS,
    ROWS_WARPS,
    add_name,
    finish_name,
    list_cleared,
)
from attnc.target.sm80.kernel import CudaDecodeText, CudaText
from attnc.target.sm80.launches import cuda_kernel, cuda_kernels
from attnc.target.sm80.lists import CudaListsText
from attnc.target.sm80.printer import STORED
from attnc.target.sticks import count_edges

#: What blocks take tiles from; the support package adds its address to the others.
COUNTER = "counter"


def cuda_declaration(
    module: Module,
    kernel: Forward | Decode,
    text: CudaText,
    back: CudaBackward | None,
    operator: str,
) -> CallText:
    """Returns the value of `CALL`: `CudaAttention(...)`."""
    fields: dict[str, Value] = {**cuda_files(module), **attention_fields(module, kernel, operator)}
    if text.layout.chunk != 8:
        fields["chunk"] = str(text.layout.chunk)
    names = text.arguments.names
    dv = text.layout.dv
    if isinstance(text, CudaDecodeText):
        kernels, of_splits, parts = decode_kernels(module, text, 4 * (dv + 1))
        fields |= of_splits
        names += parts
        if text.unified is not None and text.unified.fallback:
            names.append("fallbacks")
    else:
        kernels = [cuda_kernel(kernel.name, _blocks(kernel))]
        if kernel.grid.over == "head":
            scratch = {"acc": f"(B, H, M, {dv})", "l": "(B, H, M)", "m": "(B, H, M)"}
            fields["scratch"] = Table({name: quote_word(shape) for name, shape in scratch.items()})
            names += scratch
    sizes = (
        {"SECTION": _section(module, kernel, text)}
        if "SECTION" in text.arguments.sizes
        else fixed_split_size(text.arguments.sizes)
    )
    passed = text.arguments
    if (lists := text.lists) is not None:
        add_scratch(fields, lists.result, lists.memory)
        kernels, names = [lists.launch, *kernels], [*names, lists.result]
    fields["launches"] = Items([cuda_kernels(kernels, names, passed.strides, passed.sizes, sizes)])
    if back is not None:
        fields["backward"] = back.declared
    return CallText("CudaAttention", fields=fields)


def cuda_files(module: Module) -> dict[str, Value]:
    """Returns where the kernels' files are, what their names begin with, and the element type of kernels that
    are compiled for several.
    """
    variant = module.variant
    found: dict[str, Value] = {"module": "__file__", "file": quote_word(variant.kernels)}
    if variant.element_param:
        found["element"] = quote_word(STORED[variant.attention.element])
    return found


def decode_kernels(
    module: Module, text: CudaDecodeText, join_bytes: int, shares: str = ""
) -> tuple[list[CallText], dict[str, Value], list[str]]:
    """Returns the kernels of a decode, how the keys of a sequence are split with the memory for what comes of
    splits, and its addresses. join_bytes: shared memory of a warp that joins splits; shares: blocks that
    share a tile, as a factor.
    """
    split = text.split
    blocks = "tiles * SPLITS" if split else tiles(module, text.kernel)
    kernels = [cuda_kernel(text.kernel.name, blocks + shares)]
    if split is None:
        return kernels, {}, []
    own = {"shared": f"config.WARPS * {join_bytes}"}  # a tile's would let few blocks fit
    kernels.append(cuda_kernel(split.joined_by, text.layout.joining_blocks, changes=own, joins=True))
    more = " + rows * 2" if split.joins_more else ""  # which is joined as segments are
    size = quote_word(f"SPLIT_ROWS * {width_of_split(text.kernel, split.columns)}{more}")
    fields: dict[str, Value] = {
        "split": split_record(module, text.kernel, split.planned, None),
        "scratch": Table({"splits": size}),
    }
    statistics = [f"splits+SPLIT_ROWS*{4 * split.columns}"] if text.kernel.softmax.has_statistics else []
    return kernels, fields, ["splits", *statistics]


def fixed_split_size(sizes: Sequence[str]) -> dict[str, str]:
    """Returns keys of a split, where some config fixes them; 0: they are counted."""
    return {"SPLIT_SIZE": "config.split_size"} if "SPLIT_SIZE" in sizes else {}


def _list_forms(kernel: CallText, in_rounds: Rounds | None) -> Iterator[CallText]:
    """Lists the forms of a kernel that runs in rounds; one has no blocks where it is not launched."""
    if in_rounds is None:
        yield kernel
        return
    name, blocks = (value.strip('"') for value in map(str, kernel.values))
    fields = kernel.fields or {}
    known = fields.get("changes", Table({}))
    assert isinstance(known, Table)
    for changes, when in in_rounds.forms[name]:
        changed = {**known.items, **{field: quote_word(text) for field, text in changes.items()}}
        more = {"changes": Table(changed)} if changed else {}
        yield replace(
            kernel, values=[quote_word(name), in_words(f"{blocks} * ({when})")], fields={**fields, **more}
        )


def _blocks(kernel: Forward | Decode) -> str:
    if kernel.grid.over == "head":
        return "B * H"
    count = count_tiles(kernel)
    return f"min({count}, multiprocessors())" if kernel.grid.persistent else count


def count_tiles(kernel: Forward | Decode) -> str:
    """Returns how many tiles of queries a call has: of packed ones, at most."""
    sequences = kernel.grid.sequences
    if sequences is None:
        return "cdiv(M, BLOCK_M) * B * H"
    return f"({show(sequences.rows)} // BLOCK_M + B + 1) * H"


def _section(module: Module, kernel: Forward | Decode, text: CudaText) -> str:
    keys = show(longest(module.variant.attention, Role.KEY))
    row_bytes = (text.layout.d + text.layout.dv) * text.layout.element.bytes
    heads = "B * H" if kernel.grid.sequences is None else "H"
    return section(kernel.grid.section, heads, "N" if keys == "N" else f"{keys} // B", row_bytes)


def _rename_stride(stride: str, copied: Iterable[tuple[str, str]]) -> str:
    """Returns the name of a stride, of a copy where there is one."""
    return next((copy + stride[-1] for name, copy in copied if stride[:-1] == name), stride)


#: Walks over queries for each multiprocessor that are enough, and parts of them where they are fewer.
_WALKS = (4, 8)


class CudaBackward(BackwardDeclaration):
    """The backward of a CUDA module. files: the kernels in the order of execution, with their sources; lists:
    the kernel that comes first, if a mask lists blocks.
    """

    rounds_dq = True
    #: Whether blocks may share the walk of a kv tile over queries.
    cuts_walks = False
    #: Whether spans of keys may have a sum of dq each, and the axis of them.
    spans_keys, spans = False, ""
    #: Bytes that kernels over keys add to for each row of a query head, and the room in which all heads that
    #: they walk over are one section, "" for none.
    sum_bytes, joined_section = 0, ""
    #: The size that says how many of them a kv head counts as, where they have query heads of their own.
    head_parts = ""

    def __init__(
        self,
        module: Module,
        arguments: ArgumentText,
        files: Mapping[str, str],
        lists: CudaListsText | None = None,
    ) -> None:
        assert module.backward is not None
        super().__init__(module, [name for planned in module.backward.kernels for name in planned.makes])
        self._arguments, self.files, self._lists = arguments, files, lists
        plan = backward_layout_of(module.backward)
        self._layout = plan.layout
        preprocess = module.backward.preprocess
        self.in_rounds = module.backward.rounds
        #: Walks over queries of a launch.
        self.walks = "ROUND_WALKS" if self.in_rounds else "WALKS"
        self._sums = plan.sums or (preprocess is not None and bool(preprocess.prologue.adjoints))
        self.limits_registers = any(planned.limits_registers for planned in self._backward.kernels)
        self.kv_heads = "Hkv" if "Hkv" in arguments.sizes else "H"

    @property
    def declared(self) -> CallText:
        copies = copies_of(self.module)
        copied = [(f"stride_{name}", f"stride_{copy}") for name, copy in copies.items()]
        in_rounds = self.in_rounds
        launch = cuda_kernels(
            [form for kernel in self.kernels() for form in _list_forms(kernel, in_rounds)],
            [copies.get(name, name) for _, name in self._arguments.pointers if name != COUNTER],
            [[_rename_stride(name, copied) for name in names] for names in self._arguments.strides],
            self._arguments.sizes,
            {**(in_rounds.of_round if in_rounds else {}), **self.sections},
            {copies.get(name, name): rows for name, rows in self.maps.items()},
            rounds="ROUNDS" if in_rounds else "",
        )
        return self.fields(self.sizes, Items([*self.first_launches, launch]))

    def kernels(self) -> Iterator[CallText]:
        return (self.kernel(name) for name in self.files)

    @property
    def first_launches(self) -> list[CallText]:
        return [] if self._lists is None else [self._lists.own_launch(self.configs[0])]

    @property
    def maps(self) -> dict[str, str]:
        return {}

    def sum_of_dq(self) -> list[CallText]:
        config = self.configs[-1]
        packed, plain = f"H, M_padded // {config}.BLOCK_M", f"B, H, cdiv(M, {config}.BLOCK_M)"
        return [
            declare_allocation("dq", like="q", zero=self.packs_queries and self.leaves_rows),
            declare_allocation(
                "dq_sum",
                f"f32[{self.spans}{packed if self.packs_queries else plain}, {self.size_of_dq}]",
                zero=self.clears_dq,
            ),
        ]

    @property
    def leaves_rows(self) -> bool:
        return super().leaves_rows and not list_cleared(self.module)

    @property
    def clears_dq(self) -> bool:
        return True

    @property
    def size_of_dq(self) -> str:
        return f"dq_floats({self.configs[-1]}, {self._layout.qk.width // 16})"

    @property
    def row_sizes(self) -> str:
        return "H, M_padded" if self.packs_queries else "B, H, M_padded"

    @property
    def sizes(self) -> dict[str, str]:
        edges = {"EDGES": count_edges(self.module, self.configs[0])} if self._arguments.edges else {}
        return {**self._padded, **edges, **self._parts, **(self.in_rounds.sizes if self.in_rounds else {})}

    @property
    def _parts(self) -> dict[str, str]:
        if not self._arguments.parts:
            return {}
        planned = next(x for x in self._backward.kernels if not x.over_q)
        walks = self._tiles(planned).replace("BLOCK_N", f"{planned.config}.BLOCK_N")
        enough, wanted = (f"{count} * multiprocessors()" for count in _WALKS)
        name = self.module.variant.attention.k.name
        keys = next(arg for arg in self.module.args if arg.tensor.name == name)
        rows = [show_size(bind) for bind in keys.axes[:-1]]
        return {
            "WALK_PARTS": f"count_parts({walks}, G, 1, {enough}, {wanted}, 0)",
            "KEY_ROWS": " * ".join(rows),
        }

    def list_allocations(self) -> Iterator[CallText]:
        yield from super().list_allocations()
        for name in self._arguments.edges:
            yield declare_allocation(name, f"f32[{self.row_sizes}, EDGES]")
        for name in self._arguments.parts:
            columns = self._layout.dv if name == "dv_sum" else self._layout.d
            shape = f"f32[KEY_ROWS, WALK_PARTS * (WALK_PARTS > 1), {columns}]"
            yield declare_allocation(name, shape, zero=self.leaves_rows)
        for name, type_ in (self.in_rounds.workspaces if self.in_rounds else {}).items():
            yield declare_allocation(name, type_)
        yield from self.list_sums()
        for name, size in ({} if self._lists is None else self._lists.allocations).items():
            yield declare_allocation(name, f"i32[{size}]", zero=name == "_row_bits")

    def list_sums(self) -> Iterator[CallText]:
        """Lists what blocks sum that share the walk of a tile, to be added by another kernel."""
        yield from ()

    @property
    def _padded(self) -> dict[str, str]:
        tiles = [f"{config}.BLOCK_M" for config in self.configs]
        if self.packs_queries:
            most = tiles[0] if len(tiles) == 1 else f"max({', '.join(tiles)})"
            return {"ROW_TILE": most, "M_padded": f"({self.queries} // ROW_TILE + B + 1) * ROW_TILE"}
        return {"M_padded": f"whole_tiles(M, {', '.join(tiles)})"}

    @property
    def sections(self) -> dict[str, str]:
        row_bytes = (self._layout.d + self._layout.dv) * self._layout.element.bytes
        packs_keys, keys = self._arguments.tensors.packs(Role.KEY), self.keys
        queries = f"{self.queries} // B" if self.packs_queries else "M"
        shared = f"{queries} * G" if self.kv_heads == "Hkv" else queries
        heads = "H" if self.packs_queries else "B * H"
        kv_heads = self.kv_heads if packs_keys else f"B * {self.kv_heads}"
        if self.in_rounds:
            heads, kv_heads = self.in_rounds.heads
        if self.head_parts:
            shared, kv_heads = f"{shared} // {self.head_parts}", f"{kv_heads} * {self.head_parts}"
        planned = self.section
        return {
            "SECTION": section(planned, heads, keys, row_bytes),
            "KV_SECTION": section(
                planned, kv_heads, shared, row_bytes + self.sum_bytes, joined=self.joined_section
            ),
        }

    @property
    def keys(self) -> str:
        packs = self._arguments.tensors.packs(Role.KEY)
        return f"{show(longest(self.module.variant.attention, Role.KEY))} // B" if packs else "N"

    @property
    def section(self) -> Section | None:
        return self._backward.kernels[0].grid.section

    def kernel(self, name: str) -> CallText:
        preprocess, epilogue = self._backward.preprocess, self._backward.epilogue
        if epilogue is not None and name == epilogue.name:
            blocks = "M_padded // BLOCK_M * B * H"
            sums = sum(adjoint.along == ("tile", "d") for adjoint in epilogue.adjoints)
            columns = 16 * ROWS_WARPS * self._columns * sums  # a sum for each eight threads
            if epilogue.sequences is not None:
                blocks = f"({show(epilogue.sequences.rows)} // BLOCK_M + B + 1) * H"
            own = {"WARPS": str(ROWS_WARPS), "STAGES": "1", "shared": str(max(columns, 4 * ROWS_WARPS))}
            own |= {"maxnreg": "0"} if self.limits_registers else {}
            return cuda_kernel(name, blocks, config=self.configs[0], changes=own)
        if preprocess is not None and name == preprocess.name:
            tiles = "M_padded // ROW_TILE" if self.packs_queries else "M_padded // BLOCK_M * B"
            own = {
                "WARPS": str(ROWS_WARPS),
                "STAGES": "1",
                "shared": str(4 * ROWS_WARPS if self._sums else 0),
            }
            if self.limits_registers:
                own["maxnreg"] = "0"
            return cuda_kernel(name, f"{tiles} * H", config=self.configs[0], changes=own)
        if name == finish_name(self.module):
            return cuda_kernel(name, "cdiv(M, BLOCK_M) * B * H", config=self.configs[-1])
        if name == add_name(self.module):
            widths = [self._layout.dv if x == "dv_sum" else self._layout.d for x in self._arguments.parts]
            pieces = f"cdiv(KEY_ROWS * {max(widths) // 8}, {32 * ADD_WARPS})"
            own = {"WARPS": str(ADD_WARPS), "STAGES": "1", "shared": "0"}
            most = f"min({pieces}, {ADD_BLOCKS} * multiprocessors()) * (WALK_PARTS > 1)"
            return cuda_kernel(name, most, config=self.configs[-1], changes=own)
        planned = next(planned for planned in self._backward.all_kernels if planned.name == name)
        return cuda_kernel(name, self.blocks(planned), config=planned.config)

    def blocks(self, planned: BackwardKernel) -> str:
        slices = self._slices(planned)
        shared = " * WALK_PARTS" if self._arguments.parts and not planned.over_q else ""
        return self._tiles(planned) + (f" * {slices}" if slices > 1 else "") + shared

    def _slices(self, planned: BackwardKernel) -> int:
        assert self.module.backward is not None
        return backward_layout_of(self.module.backward).slices(planned.kind)

    def _tiles(self, planned: BackwardKernel) -> str:
        grid = planned.grid
        block, heads = ("BLOCK_M", "H") if grid.over == "q" else ("BLOCK_N", self.kv_heads)
        if planned.takes_ds:
            return "M_padded // BLOCK_M * ROUND_HEADS"
        if grid.sequences is not None:
            return f"({show(grid.sequences.rows)} // {block} + B + 1) * {heads}"
        match grid.over:
            case "q":
                return f"M_padded // BLOCK_M * B * {heads}"
            case "head":
                return f"B * {heads}"
            case _:
                return f"cdiv(N, BLOCK_N) * B * {heads}"
