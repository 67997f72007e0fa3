"""The pieces of a CUDA kernel's text about tiles in shared memory: their columns, permutations and copies."""

from __future__ import annotations

from attnc.plan.ir import Kernel, Module
from attnc.plan.sm80.layout import CudaLayout, Swizzle
from attnc.target.sm80.elements import ElementText
from attnc.target.sm80.places import PlaceText


class TileText(PlaceText, ElementText):
    """Attribute by attribute what `templates/cuda/*.jinja` print about tiles."""

    def __init__(self, module: Module, kernel: Kernel, layout: CudaLayout) -> None:
        super().__init__(module, kernel, layout)
        self.padded = (layout.d, layout.dv) != (layout.qk.width, layout.v.width)

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
        """The address of a chunk in an even row, permuted as in the row after it."""
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
        """The same of keys and values in pages."""
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
        """Where a chunk of a value lies in its tile."""
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
