"""The pieces of a Hopper decode kernel's text, and of the kernel that joins its splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, takewhile

from attnc.expr.construct import ZERO
from attnc.expr.nodes import Expr
from attnc.plan.ir import Arg, Decode, Let, Module
from attnc.plan.sm90.decode import BLOCKS, Sm90DecodeLayout
from attnc.plan.sm90.layout import PIECE, widest_product
from attnc.plan.sm90.narrow import CONVERTING_WARPS
from attnc.target.sm80.kernel import CudaDecodeText
from attnc.target.sm80.lists import CudaListsText
from attnc.target.sm80.loop import TileLoop
from attnc.target.sm80.printer import scalar
from attnc.target.sm90.narrow import NarrowTiles
from attnc.target.sm90.tiles import FRAGMENT, Boxes, WgmmaTiles, list_key_tiles, parts_of


class Sm90DecodeText(CudaDecodeText):
    """Attribute by attribute what `templates/sm90/decode.cu.jinja` and its parts print; scores, masks and
    splits are as for `cuda.sm_80`.
    """

    kernel: Decode
    _fragment = FRAGMENT
    boxes: Boxes
    wgmma: WgmmaTiles

    layout: Sm90DecodeLayout
    body, frame = "decode", "decode_module"
    is_decode = True
    score_keys, first_raw = "BLOCK_N", "TILES_END"
    stores_in_order = False
    is_backward = searches_together = False
    searching_lanes = "32"
    shared_declaration = "extern __shared__ __align__(1024) unsigned char shared[];"

    def __init__(self, module: Module, kernel: Decode, layout: Sm90DecodeLayout) -> None:
        super().__init__(module, kernel, layout)
        self.shares_columns = layout.consumers == 2
        lane = "consumer == 0 && " if self.shares_columns else ""
        self.thread = replace(self.thread, row="16 * warp + 8 * r + g", lane=lane, heads=self._alone)
        widths = dict.fromkeys(map(layout.columns, kernel.configs))
        parts = [parts_of(columns, widest_product(layout.entry_registers)) for columns in widths]
        self.keeps_rest = self.shares_columns and layout.rest > 0
        sums = list(dict.fromkeys(columns for part in parts for _, columns in part))
        key_tiles, self.boxes = list_key_tiles(kernel), Boxes(self)
        self.wgmma = WgmmaTiles(
            layout,
            key_tiles=key_tiles,
            sum_columns=sums,
            parts=parts[0],
            page=self.page,
            warps=CONVERTING_WARPS if layout.narrow else 1,
            more_wgmma=[
                *(f"WGMMA_SS_ROWS({columns})" for columns in sums if self.shares_columns),
                *(f"WGMMA_RS_COLUMNS({keys})" for keys in key_tiles if self.keeps_rest),
            ],
        )
        self.blocks_share = layout.shares
        self.narrow = NarrowTiles(self, layout.narrow, self.first_raw) if layout.narrow else None
        self.registers, self.blocks = layout.registers_of(layout.consumers), BLOCKS[layout.consumers]
        self.lists = None if module.lists is None else CudaListsText(module, module.lists, self.dtypes)
        self.v_at = "K_AT" if layout.v_in_k else "V_AT"
        self.v_bytes = "K_BYTES" if layout.v_in_k else "V_BYTES"

    # -- tiles ---------------------------------------------------------------------------------------------

    @property
    def page(self) -> int:
        """Keys of a page: a list is a table of pages of one key."""
        return self.layout.page

    @property
    def page_entry(self) -> str:
        return "list_row[kv_idx]" if self.lists is not None else super().page_entry

    def pool(self, name: str) -> str:
        """Returns where rows of K or V lie: `Pool`."""
        if self.lists is None:
            return self.boxes.pool(name)
        tensor = self.view.rows(name).tensor
        return f"{{args.{tensor}_ptr + {self.offset(name)}, args.stride_{tensor}n, 0}}"

    @property
    def _alone(self) -> str:
        """The heads of a query that is alone in its tiles; empty where tiles have rows of several."""
        pack = self.kernel.pack
        return scalar(pack.group) if pack is not None and pack.alone else ""

    @property
    def group(self) -> str:
        return "query_rows" if self._alone else super().group

    @property
    def first_head(self) -> str:
        head = self.kernel.walk.head
        return f"{head} * {self._alone} + " if self._alone and head else super().first_head

    @property
    def sizes(self) -> Iterator[str]:
        yield from super().sizes
        if self._alone:
            rows = f"({self._alone} + BLOCK_M - 1) / BLOCK_M * BLOCK_M"
            yield f"const int query_rows = {rows};  // of a query: its heads, and rows that are none"

    @property
    def is_head(self) -> str:
        """Where rows behind the heads of a query are none: a condition for `row`, else empty."""
        return f" && row % {self.group} < {self._alone}" if self._alone else ""

    @property
    def parts_of_a_stage(self) -> str:
        if self.shares_columns:
            shared = "the columns of V that each warpgroup multiplies"
            return f"{shared}; what is not in V comes with either" if self.v_in_k else f"{shared}, and K"
        return "K, with V in it" if self.v_in_k else "K and V"

    @property
    def tiles_end(self) -> str:
        return "RAW_END" if self.narrow else "TILES_END"

    @property
    def exponent(self) -> str:
        return f"s[j][2 * r + c]{self.times_scale} - m[r]"

    @property
    def split_columns(self) -> int:
        return self.layout.dv_multiplied

    @property
    def stored_columns(self) -> str:
        return self.wgmma.dv_stored if self.stores_half else "COLUMNS"

    @property
    def stores_half(self) -> bool:
        return self.layout.dv < self.layout.dv_multiplied

    @property
    def rest_steps(self) -> str:
        return "(D - DV) / 16" if self.layout.d % PIECE else "4 * REST"

    @property
    def first_column(self) -> str:
        block = "sharer * BLOCK_D + " if self.blocks_share else ""
        return f"{block}consumer * COLUMNS + " if self.shares_columns else ""

    @property
    def has_statistics(self) -> str:
        block = "sharer == 0 && " if self.blocks_share else ""
        return f"{block}consumer == 0 && " if self.shares_columns else ""

    @property
    def number_of_tile(self) -> str:
        return "blockIdx.x / SHARERS" if self.blocks_share else "blockIdx.x"

    @property
    def clears_values(self) -> bool:
        return self.finds_unseen_values

    @property
    def finds_unseen_values(self) -> bool:
        """Whether rows of v in a partial tile have to be made zero: TMA does so behind the tensor alone, and
        copies of single rows behind the last key.
        """
        shortened = any(isinstance(item, Let) and item.name == "N" for item in self.kernel.program)
        return self.kernel.step.kept is not None or (shortened and not self.copies_rows)

    def _plan_loop(self, loop: TileLoop) -> TileLoop:
        planned = super()._plan_loop(loop)
        return replace(planned, step="split_step") if self.kernel.split is not None else planned

    # -- splits --------------------------------------------------------------------------------------------

    @property
    def copies_rows(self) -> bool:
        return self.layout.copies == "rows"

    @property
    def starts_early(self) -> bool:
        """Whether the first tile of a block is known before any length is: it is copied, or, of rows, its
        pages are looked up.
        """
        split, loops = self.kernel.split, self.kernel.regions.loops
        first = loops[0].start if split is None else split.lo
        return self.lists is None and (
            first == ZERO
            and not self.loop.guard
            and self.view.rows("k").first is None
            and "N" in self.kernel.dims
        )

    @property
    def start_of_split(self) -> list[str]:
        split = self.kernel.split
        if split is None:
            return []
        assert split.in_turn
        if not self.has_fixed_splits:
            comment, step = "every so many-th tile", "const int split_step = args.SPLITS * BLOCK_N;"
        else:
            comment = "so many keys, or every so many-th tile"
            step = "const int split_size = args.SPLIT_SIZE, "
            step += "split_step = split_size > 0 ? BLOCK_N : args.SPLITS * BLOCK_N;"
        return [
            f"// this block's split: {comment}",
            step,
            *(self._first_of_split if self.starts_early else []),
        ]

    @property
    def _first_of_split(self) -> list[str]:
        assert self.kernel.split is not None
        lo = "" if self.kernel.split.lo == ZERO else f"{scalar(self.kernel.split.lo)} + "
        tile = "(split_size > 0 ? split_size : BLOCK_N)" if self.has_fixed_splits else "BLOCK_N"
        return [f"const int split_lo = {lo}split * {tile};"]

    @property
    def own_split(self) -> list[str]:
        split = self.kernel.split
        if split is None:
            return []
        end = hi = scalar(split.hi)
        if self.has_fixed_splits:
            end = f"split_size > 0 ? min(split_lo + split_size, {hi}) : {hi}"
        return [*([] if self.starts_early else self._first_of_split), f"const int split_hi = {end};"]

    @property
    def loads(self) -> list[str]:
        """The first lines of `program`, which ask memory and wait for nothing: where rows lie, lengths."""
        if self.lists is not None:
            return list(self._find_list())
        found = takewhile(lambda item: not isinstance(item, Let), self.kernel.program)
        return [self.statement(item) for item in found]

    def _find_list(self) -> Iterator[str]:
        *others, length = self.kernel.program
        yield from map(self.statement, others)
        row = f"args._lists_ptr + max(list_line, 0) * (long long)({scalar(self._entries)} + 1)"
        yield f"const int* const list_row = {row} + 1;  // keys behind their number"
        yield "const int list_length = list_line < 0 ? 0 : list_row[-1];"
        yield self.statement(length)

    @property
    def _entries(self) -> Expr:
        assert self.lists is not None
        return self.lists.made.extents[-1]

    @property
    def program(self) -> Iterator[str]:
        if self.lists is None:
            yield from islice(super().program, len(self.loads), None)

    # -- arguments -----------------------------------------------------------------------------------------

    @property
    def maps(self) -> list[str]:
        if self.copies_rows:
            return []
        return ["k"] if self.v_in_k else ["k", "v"]

    @property
    def arguments(self) -> list[Arg]:
        return [arg for arg in super().arguments if arg.tensor.name not in self.maps]

    @property
    def more_pointers(self) -> list[str]:
        return [*super().more_pointers, *(["int* _lists_ptr;"] if self.lists else [])]

    @property
    def size_names(self) -> list[str]:
        names = super().size_names
        return [*names, *(name for name in (self.lists.sizes if self.lists else ()) if name not in names)]

    def row_at(self, name: str) -> str:
        """Returns where row `row` of q or o begins."""
        first = f"args.{name}_ptr + b * args.stride_{name}b"
        query, head = self.query_of("row"), self.head_of("row")
        return f"{first} + ({query}) * args.stride_{name}m + ({head}) * args.stride_{name}h"
