"""Text of what is copied and what wgmma multiplies: boxes of rows of a tensor or of a page, single rows, and
functions around one wgmma instruction, whose operands are named one by one, so that each width has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import gcd
from typing import NamedTuple

from attnc.model.tensors import Role
from attnc.plan.signature import RowZero
from attnc.plan.sm80.layout import CudaLayout
from attnc.plan.sm90.layout import PIECE, Products


class WgmmaTiles:
    """Tiles of a kernel in shared memory, and their products.

    d_stored, dv_stored: columns of rows of q and k, of v and o, as C++, where D and DV are those of products;
    parts: the products of p v, each with the fragments of acc before it, its own, and the panels of v before
    it; box: keys that are copied at once, which lie in one page; box_rows: the same as declarations say it,
    or all keys of a tile, of one of the `warps` that have rows of their own; functions: macros of
    `support/sm90_wgmma.cuh` that define the products, some by names in `more`; v_at, v_bytes: where tiles of
    v begin, which may be those of k, and the size of one.
    """

    def __init__(
        self,
        layout: CudaLayout,
        *,
        key_tiles: Sequence[int],
        sum_columns: Iterable[int],
        parts: Products = (),
        page: int = 0,
        warps: int = 1,
        **more: Iterable[int],
    ) -> None:
        padded_d, padded_dv = layout.d != layout.d_multiplied, layout.dv != layout.dv_multiplied
        self.d_stored = str(layout.d) if padded_d else "D"
        self.dv_stored = str(layout.dv) if padded_dv else "DV"
        self.parts = [(first // 8, columns // 8, first // PIECE) for first, columns in parts]
        v = "K" if layout.v_in_k else "V"
        self.v_at, self.v_bytes = f"{v}_AT", f"{v}_BYTES"
        last, *others = key_tiles or [0]
        boxes = [f"BLOCK_N == {tile} ? {gcd(page, tile // warps)} : " for tile in others]
        self.box = f"{''.join(boxes)}{gcd(page, last // warps)}"
        keys = "BLOCK_N" if warps == 1 else f"BLOCK_N // {warps}"
        self.box_rows = f"gcd({page}, {keys})" if page else keys
        widths = {"SS": key_tiles, "RS": dict.fromkeys(sum_columns), **more}
        self.functions = [f"WGMMA_{name}({width})" for name, found in widths.items() for width in found]

    def stored_columns(self, gradient: str) -> str:
        return self.dv_stored if gradient == "dv" else self.d_stored


#: Where scores have the element of row r of a thread in column c of its group j: a warp has 16 rows.
FRAGMENT = "[j][2 * r + c]"


class Boxes(NamedTuple):
    """Where boxes of rows are found. find_zero: where row 0 of a matrix lies."""

    find_zero: Callable[[str], RowZero]

    def coordinates(self, name: str, row: str, page: str = "") -> str:
        """Returns row, head and batch of a box that begins at a row, as TMA takes them. page: in the place of
        the batch, where rows lie in pages.
        """
        place = self.find_zero(name)
        indices = place.indices
        first, head, batch = (indices.get(role, "") for role in (place.rows, Role.HEAD, Role.BATCH))
        return f"{first + ' + ' if first else ''}{row}, {head or '0'}, {page or batch or '0'}"
