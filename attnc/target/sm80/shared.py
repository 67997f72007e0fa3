"""Tiles in shared memory of a CUDA kernel: their columns, permutations, the functions that copy them, and
which threads do so.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnc.plan.sm80.layout import CudaLayout, Swizzle


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTiles:
    """Tiles of q, k, v and o. page: rows of a page of keys, 0 without pages; by_warp: whether each warp has
    tiles of its own; streams_values: whether a stage holds a tile of v, too.
    """

    layout: CudaLayout
    page: int = 0
    by_warp: bool = False
    streams_values: bool = True

    @property
    def same(self) -> bool:
        return (self.layout.d, self.layout.qk) == (self.layout.dv, self.layout.v)

    @property
    def d(self) -> str:
        return "D_TILE" if self.layout.is_padded else "D"

    @property
    def dv(self) -> str:
        return "DV_TILE" if self.layout.is_padded else "DV"

    @property
    def widest(self) -> str:
        return self.d if self.layout.qk.width >= self.layout.v.width else self.dv

    @property
    def swizzles(self) -> list[tuple[str, Swizzle, str, str]]:
        if self.same:
            return [("", self.layout.qk, self.d, "q, k, v and o")]
        return [("_qk", self.layout.qk, self.d, "q and k"), ("_v", self.layout.v, self.dv, "v and o")]

    def permutation(self, swizzle: Swizzle) -> str:
        """Returns what the number of a chunk is combined with."""
        mask = swizzle.period - 1
        return f"(row & {mask})" if swizzle.span == 1 else f"(row / {swizzle.span} & {mask})"

    def next_row(self, swizzle: Swizzle) -> str:
        """Returns the address of a chunk in an even row, permuted as in the row after it."""
        return "(place ^ 16)" if swizzle.span == 1 else "place"

    @property
    def at_qk(self) -> str:
        return "at" if self.same else "at_qk"

    @property
    def at_v(self) -> str:
        return "at" if self.same else "at_v"

    @property
    def after_qk(self) -> str:
        return "after" if self.same else "after_qk"

    @property
    def copied(self) -> list[tuple[str, str, str, str, str]]:
        if self.page:
            return [(f"copy_{self.copy_q}", self.at_qk, "D", self.d, "q")]
        if self.same:
            return [("copy_rows", "at", "D", self.d, "q, k or v")]
        v = [] if self.layout.v_in_k else [("copy_v_rows", "at_v", "DV", self.dv, "v")]
        return [("copy_qk_rows", "at_qk", "D", self.d, "q or k"), *v]

    @property
    def paged(self) -> list[tuple[str, str, str, str, str]]:
        if not self.page:
            return []
        if self.same:
            return [("copy_pages", "at", "D", self.d, "k or v")]
        v = [] if self.layout.v_in_k else [("copy_v_pages", "at_v", "DV", self.dv, "v")]
        return [("copy_k_pages", "at_qk", "D", self.d, "k"), *v]

    @property
    def end(self) -> str:
        if self.by_warp:
            return "k_tiles"
        if self.layout.v_in_k:
            return f"k_tiles + STAGES * BLOCK_N * {self.d}"
        return f"v_tiles + {'STAGES * ' if self.streams_values else ''}BLOCK_N * {self.dv}"

    @property
    def at_value(self) -> str:
        return self.at_qk if self.layout.v_in_k else self.at_v

    @property
    def after_value(self) -> str:
        return self.after_qk if self.layout.v_in_k or self.same else "after_v"

    @property
    def below_value(self) -> str:
        return self.after_value.replace("after", "below")

    @property
    def value(self) -> str:
        return self.d if self.layout.v_in_k else self.dv

    @property
    def copy_q(self) -> str:
        return "rows" if self.same else "qk_rows"

    @property
    def copy_k(self) -> str:
        if self.page:
            return "pages" if self.same else "k_pages"
        return self.copy_q

    @property
    def copy_v(self) -> str:
        kind = "pages" if self.page else "rows"
        return kind if self.same else f"v_{kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copiers:
    """The threads that copy a tile of keys: the whole block, or each warp its own keys."""

    by_warp: bool

    @property
    def barrier(self) -> str:
        return "__syncwarp()" if self.by_warp else "__syncthreads()"

    @property
    def count(self) -> str:
        return "WARP_N" if self.by_warp else "BLOCK_N"

    @property
    def rows(self) -> str:
        return "WARP_N, 32" if self.by_warp else "BLOCK_N"

    @property
    def sharers(self) -> str:
        return "SHARERS" if self.by_warp else "THREADS"

    @property
    def first(self) -> str:
        return " + warp * WARP_N" if self.by_warp else ""

    def buffer(self, tiles: str, columns: str) -> str:
        row = "(stage * BLOCK_N + warp * WARP_N)" if self.by_warp else "stage * BLOCK_N"
        return f"{tiles} + {row} * {columns}"
