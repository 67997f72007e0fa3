"""The pieces of a CUDA kernel's text that say where rows lie in global memory: tiles, lengths, pages, packed
sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from attnc.model.dtypes import DType
from attnc.plan.ir import Decode, Forward, Let, Module
from attnc.plan.sm80.layout import CudaLayout
from attnc.target.kernel_view import OutputView
from attnc.target.sm80.dropout import Drawing
from attnc.target.sm80.elements import FRAGMENT, Elements
from attnc.target.sm80.loop import TileLoop
from attnc.target.sm80.printer import STORED, CudaWalk, offset, scalar, statement
from attnc.target.sm80.shared import Copiers, SharedTiles

# --- tiles of rows


#: Matrices whose rows are copied or stored in tiles, and what their places are called in a kernel.
PLACES = {"q": "queries", "k": "keys", "v": "values", "o": "outputs"}
#: Sizes that a sequence may shorten.
_LENGTHS = ("M", "N")


class TileText(OutputView):
    """What `templates/cuda/*.jinja` print of a kernel that computes o. Its parts (elements, tiles, copiers,
    loop, dropout) have a file each.
    """

    elements: Elements
    tiles: SharedTiles
    copiers: Copiers
    loop: TileLoop
    dropout: Drawing
    _fragment = FRAGMENT

    def __init__(self, module: Module, kernel: Forward | Decode, layout: CudaLayout) -> None:
        self.module, self.kernel, self.layout = module, kernel, layout
        self.dtypes = {
            arg.tensor.name: DType(arg.tensor.dtype) for arg in (*module.args, *module.outputs, *module.kept)
        }
        by_warp = layout.warp_split == "kv" and layout.merge == "end"
        self.elements = Elements(is_f32=layout.is_f32, fragment=self._fragment)
        self.tiles = SharedTiles(
            layout=layout, page=self.page, by_warp=by_warp, streams_values=kernel.grid.over == "q"
        )
        self.copiers = Copiers(by_warp=by_warp)
        self.loop = self._plan_loop(TileLoop(kernel=kernel, dtypes=self.dtypes))
        self.dropout = Drawing(kernel.softmax.dropout)
        self.h_kv = scalar(kernel.kv_head)
        self.v_in_k = layout.v_in_k
        self.padded = layout.is_padded

    def _plan_loop(self, loop: TileLoop) -> TileLoop:
        return loop

    @property
    def times_scale(self) -> str:
        return "" if self.kernel.softmax.scale is None else " * SCALE"

    @property
    def group(self) -> str:
        """Heads that share keys and fill the rows of a tile together; empty where they do not."""
        return ""

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
        declared = {*self.kernel.dims, *(["M"] if self.kernel.grid.sequences is not None else [])}
        for item in self.kernel.program:
            if isinstance(item, Let) and item.name in _LENGTHS and item.name not in declared:
                declared.add(item.name)
                yield f"int {item.name} = {scalar(item.value)};"
            else:
                yield statement(item, self.dtypes, tuple(declared))

    # -- rows in global memory -----------------------------------------------------------------------------

    @property
    def page(self) -> int:
        return self.rows("k").page

    @property
    def run(self) -> int:
        """Rows of a tile that surely lie in one page: tiles and shares start at multiples of 16."""
        return math.gcd(self.page, 16)

    @property
    def table_type(self) -> str:
        name = self.rows("k").table_stride.removeprefix("stride_").rsplit("_", 1)[0]
        return STORED[self.dtypes[name]]

    @property
    def places(self) -> Iterator[str]:
        yield from (self.place(name) for name in "qkv" if name != "v" or not self.v_in_k)

    def place(self, name: str) -> str:
        """Returns where the rows of a matrix lie, as a declaration."""
        rows = self.rows(name)
        of, letter = rows.tensor, "n" if name in ("k", "v") else "m"
        first = f"args.{of}_ptr + {self.offset(name)}"
        if rows.page:
            strides = f"args.stride_{of}p, args.stride_{of}n"
            table = f"{rows.table}, args.{rows.table_stride}"
            return f"const Pages {PLACES[name]} = {{{first}, {strides}, {table}}};"
        element = "element" if name == "o" else "const element"
        return f"const Rows<{element}> {PLACES[name]} = {{{first}, args.stride_{of}{letter}}};"

    def offset(self, name: str) -> str:
        """Returns the offset from the first element to row 0 of the sequence and head at hand; in pages, to
        the head.
        """
        return offset(self.row_zero(name))

    @property
    def lse_row(self) -> str:
        return f"args.lse_ptr[{self.offset('lse')} + row * args.stride_lsem]"

    # -- rows that do not exist ----------------------------------------------------------------------------

    @property
    def stored(self) -> str:
        return scalar(self.kernel.stored)

    def if_exists(self, value: str, otherwise: str) -> str:
        """Returns what is written to `row`."""
        return f"row < M ? {value} : {otherwise}" if self.clears else value
