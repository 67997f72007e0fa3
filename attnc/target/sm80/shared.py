"""Tiles in shared memory of a CUDA kernel: their columns, what copies them, and which threads do so."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.plan.sm80.layout import CudaLayout


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
    def d(self) -> str:
        return "D_TILE" if self.layout.is_padded else "D"

    @property
    def dv(self) -> str:
        return "DV_TILE" if self.layout.is_padded else "DV"

    @property
    def widest(self) -> str:
        return self.d if self.layout.qk.width >= self.layout.v.width else self.dv

    @property
    def end(self) -> str:
        if self.by_warp:
            return "k_tiles"
        if self.layout.v_in_k:
            return f"k_tiles + STAGES * BLOCK_N * {self.d}"
        return f"v_tiles + {'STAGES * ' if self.streams_values else ''}BLOCK_N * {self.dv}"

    @property
    def value(self) -> str:
        return self.d if self.layout.v_in_k else self.dv

    @property
    def of_keys(self) -> str:
        return "copy_pages" if self.page else self.of_queries

    @property
    def of_queries(self) -> str:
        return "share_rows" if self.by_warp else "copy_rows"


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
    def first(self) -> str:
        return " + warp * WARP_N" if self.by_warp else ""

    def buffer(self, tiles: str, columns: str) -> str:
        row = "(stage * BLOCK_N + warp * WARP_N)" if self.by_warp else "stage * BLOCK_N"
        return f"{tiles} + {row} * {columns}"
