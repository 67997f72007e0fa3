"""The pieces of a CUDA kernel's text that say where rows lie, in global memory (tiles, lengths, pages, packed
sequences) and in tiles in shared memory: columns, permutations and copies; and how elements are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from attnc.model.dtypes import DType
from attnc.plan.ir import Decode, Forward, Let, Module
from attnc.plan.sm80.layout import CudaLayout, Swizzle
from attnc.target.kernel_view import OutputView
from attnc.target.sm80.printer import STORED, CudaWalk, offset, scalar, statement

# --- elements of 16 bits, or f32


class ElementText:
    """What `templates/cuda/*.jinja` print about elements: of 16 bits, rounded two at a time, or f32."""

    layout: CudaLayout
    #: Where an accumulator has the element of row r of a thread in column c of its group j.
    fragment = "[r / 2][j][r % 2 * 2 + c]"

    @property
    def products(self) -> str:
        return f"cuda/_products{'_tf32' if self.layout.is_f32 else ''}.cu.jinja"

    @property
    def turns_columns(self) -> bool:
        return False

    @property
    def pair_type(self) -> str:
        return "Pair" if self.layout.is_f32 else "u32"

    @property
    def no_pair(self) -> str:
        return "Pair{}" if self.layout.is_f32 else "0"

    def pair(self, first: str, second: str) -> str:
        """Rounds two floats to a pair of elements."""
        return f"Pair{{{first}, {second}}}" if self.layout.is_f32 else f"pack({first}, {second})"

    def pair_element(self, which: int) -> str:
        """Returns the first or the second of `pair`."""
        if self.layout.is_f32:
            return f"pair.values[{which}]"
        return f"element{{(unsigned short){'(pair >> 16)' if which else 'pair'}}}"

    def rounded(self, value: str) -> str:
        """Returns a float as an element."""
        return value if self.layout.is_f32 else f"element{{(unsigned short)pack({value}, 0.0f)}}"

    @property
    def piece_chunk(self) -> str:
        return "2 * j + t / 2" if self.layout.is_f32 else "j"

    @property
    def in_chunk(self) -> str:
        return "t % 2 * 2" if self.layout.is_f32 else "2 * t"


# --- tiles of rows


#: Matrices whose rows are copied or stored in tiles, and what their places are called in a kernel.
PLACES = {"q": "queries", "k": "keys", "v": "values", "o": "outputs"}
#: Sizes that a sequence may shorten.
_LENGTHS = ("M", "N")


class TileText(OutputView, ElementText):
    """Attribute by attribute what `templates/cuda/*.jinja` print about storage."""

    def __init__(self, module: Module, kernel: Forward | Decode, layout: CudaLayout) -> None:
        self.module, self.kernel, self.layout = module, kernel, layout
        self.dtypes = {
            arg.tensor.name: DType(arg.tensor.dtype) for arg in (*module.args, *module.outputs, *module.kept)
        }
        self.h_kv = scalar(kernel.kv_head)
        self.v_in_k = layout.v_in_k
        self.padded = layout.is_padded

    # -- who copies tiles ----------------------------------------------------------------------------------

    @property
    def own_copies(self) -> bool:
        return self.layout.warp_split == "kv" and self.layout.merge == "end"

    @property
    def barrier(self) -> str:
        return "__syncwarp()" if self.own_copies else "__syncthreads()"

    @property
    def count(self) -> str:
        return "WARP_N" if self.own_copies else "BLOCK_N"

    @property
    def copied(self) -> str:
        """Keys that the threads copy at once, and how many threads, where they are not the whole block."""
        return "WARP_N, 32" if self.own_copies else "BLOCK_N"

    @property
    def sharers(self) -> str:
        return "SHARERS" if self.own_copies else "THREADS"

    @property
    def copy_from(self) -> str:
        return " + warp * WARP_N" if self.own_copies else ""

    def buffer(self, tiles: str, columns: str) -> str:
        """Returns where they copy to."""
        row = "(stage * BLOCK_N + warp * WARP_N)" if self.own_copies else "stage * BLOCK_N"
        return f"{tiles} + {row} * {columns}"

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

    # -- tiles in shared memory ----------------------------------------------------------------------------

    @property
    def same_tiles(self) -> bool:
        return (self.layout.d, self.layout.qk) == (self.layout.dv, self.layout.v)

    @property
    def d_tile(self) -> str:
        return "D_TILE" if self.padded else "D"

    @property
    def dv_tile(self) -> str:
        return "DV_TILE" if self.padded else "DV"

    @property
    def widest(self) -> str:
        return self.d_tile if self.layout.qk.width >= self.layout.v.width else self.dv_tile

    @property
    def swizzles(self) -> list[tuple[str, Swizzle, str, str]]:
        if self.same_tiles:
            return [("", self.layout.qk, self.d_tile, "q, k, v and o")]
        return [
            ("_qk", self.layout.qk, self.d_tile, "q and k"),
            ("_v", self.layout.v, self.dv_tile, "v and o"),
        ]

    def permutation(self, swizzle: Swizzle) -> str:
        mask = swizzle.period - 1
        return f"(row & {mask})" if swizzle.span == 1 else f"(row / {swizzle.span} & {mask})"

    def next_row(self, swizzle: Swizzle) -> str:
        """Returns the address of a chunk in an even row, permuted as in the row after it."""
        return "(place ^ 16)" if swizzle.span == 1 else "place"

    @property
    def at_qk(self) -> str:
        return "at" if self.same_tiles else "at_qk"

    @property
    def at_v(self) -> str:
        return "at" if self.same_tiles else "at_v"

    @property
    def after_qk(self) -> str:
        return "after" if self.same_tiles else "after_qk"

    @property
    def after_v(self) -> str:
        return "after" if self.same_tiles else "after_v"

    @property
    def tiles(self) -> list[tuple[str, str, str, str, str]]:
        """(function, offset function, columns, columns of the tile, what) of each copy function."""
        if self.page:
            return [(f"copy_{self.copy_q}", self.at_qk, "D", self.d_tile, "q")]
        if self.same_tiles:
            return [("copy_rows", "at", "D", self.d_tile, "q, k or v")]
        v = [] if self.v_in_k else [("copy_v_rows", "at_v", "DV", self.dv_tile, "v")]
        return [("copy_qk_rows", "at_qk", "D", self.d_tile, "q or k"), *v]

    @property
    def paged_tiles(self) -> list[tuple[str, str, str, str, str]]:
        """(function, offset function, columns, columns of the tile, what) of copies of keys and values in
        pages.
        """
        if not self.page:
            return []
        if self.same_tiles:
            return [("copy_pages", "at", "D", self.d_tile, "k or v")]
        v = [] if self.v_in_k else [("copy_v_pages", "at_v", "DV", self.dv_tile, "v")]
        return [("copy_k_pages", "at_qk", "D", self.d_tile, "k"), *v]

    @property
    def after_tiles(self) -> str:
        """What follows the tiles in shared memory; they are done with when warps sum once, at the end."""
        if self.own_copies:
            return "k_tiles"
        if self.v_in_k:
            return f"k_tiles + STAGES * BLOCK_N * {self.d_tile}"
        return f"v_tiles + {'STAGES * ' if self.kernel.grid.over == 'q' else ''}BLOCK_N * {self.dv_tile}"

    @property
    def at_value(self) -> str:
        return self.at_qk if self.v_in_k else self.at_v

    @property
    def after_value(self) -> str:
        return self.after_qk if self.v_in_k else self.after_v

    @property
    def below_value(self) -> str:
        return self.after_value.replace("after", "below")

    @property
    def value_tile(self) -> str:
        return self.d_tile if self.v_in_k else self.dv_tile

    @property
    def copy_q(self) -> str:
        return "rows" if self.same_tiles else "qk_rows"

    @property
    def copy_k(self) -> str:
        if self.page:
            return "pages" if self.same_tiles else "k_pages"
        return self.copy_q

    @property
    def copy_v(self) -> str:
        if self.page:
            return "pages" if self.same_tiles else "v_pages"
        return "rows" if self.same_tiles else "v_rows"
