"""Text of what is copied and what wgmma multiplies: boxes of rows of a tensor or of a page, single rows, and
functions around one wgmma instruction, whose operands are named one by one, so that each width has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd

from attnc.model.tensors import Role
from attnc.plan.ir import Decode, Forward
from attnc.plan.signature import RowZero
from attnc.plan.sm80.layout import CudaLayout
from attnc.plan.sm90.layout import PIECE, Products
from attnc.target.sm80.rows import GlobalRows


def products(parts: Products, accumulate: str) -> Iterator[str]:
    """Yields the body of a loop over n that multiplies p[n] with rows of v, into acc or onto it."""
    if len(parts) == 1:
        yield f"    wgmma(acc, p[n], v + n * 16 * 128 / 16, {accumulate});"
        return
    yield "{  // in parts whose results fit the registers that a thread starts with"
    for first, columns in parts:
        sums = f"(float (&)[{columns // 8}][4])acc[{first // 8}]"
        rows = f"(n * 16 * 128 + {first // PIECE} * BLOCK_N * 128) / 16"
        yield f"    wgmma({sums}, p[n], v + {rows}, {accumulate});"
    yield "}"


class WgmmaTiles:
    """Tiles of a kernel in shared memory, and their products.

    d_stored, dv_stored: columns of rows of q and k, of v and o, as C++, where D and DV are those of products;
    box: keys that are copied at once, which lie in one page; box_rows: the same as declarations say it, or
    all keys of a tile, of one of the `warps` that have rows of their own; functions: macros of
    `support/sm90_wgmma.cuh` that define the products; v_at, v_bytes: where tiles of v begin, which may be
    those of k, and the size of one.
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
        more_wgmma: Iterable[str] = (),
    ) -> None:
        padded_d, padded_dv = layout.d != layout.d_multiplied, layout.dv != layout.dv_multiplied
        self.d_stored = str(layout.d) if padded_d else "D"
        self.dv_stored = str(layout.dv) if padded_dv else "DV"
        self._parts = parts
        v = "K" if layout.v_in_k else "V"
        self.v_at, self.v_bytes = f"{v}_AT", f"{v}_BYTES"
        last, *others = key_tiles
        boxes = [f"BLOCK_N == {tile} ? {gcd(page, tile // warps)} : " for tile in others]
        self.box = f"{''.join(boxes)}{gcd(page, last // warps)}"
        keys = "BLOCK_N" if warps == 1 else f"BLOCK_N // {warps}"
        self.box_rows = f"gcd({page}, {keys})" if page else keys
        self.functions = [
            *(f"WGMMA_SS({keys})" for keys in key_tiles),
            *(f"WGMMA_RS({columns})" for columns in dict.fromkeys(sum_columns)),
            *more_wgmma,
        ]

    def stored_columns(self, gradient: str) -> str:
        """Returns the columns of rows of a gradient in memory."""
        return self.dv_stored if gradient == "dv" else self.d_stored

    def value_products(self, accumulate: str) -> list[str]:
        """acc += p v, or acc = p v, of 16 keys."""
        return list(products(self._parts, accumulate))


#: Where scores have the element of row r of a thread in column c of its group j: a warp has 16 rows.
FRAGMENT = "[j][2 * r + c]"


class Boxes:
    """Where boxes of rows are found."""

    def __init__(self, find_zero: Callable[[str], RowZero], rows: GlobalRows | None = None) -> None:
        """find_zero: where row 0 of a matrix lies; rows: of the kernel, where K and V may lie in pages."""
        self._find_zero, self._rows = find_zero, rows

    def pool(self, name: str) -> str:
        """Returns where rows of K or V of the head at hand lie: in page 0, and what follows; or, of a list,
        where each key is a page.
        """
        assert self._rows is not None
        tensor = self._rows.view.rows(name).tensor
        steps = f"args.stride_{tensor}p, args.stride_{tensor}n"
        if self._rows.by_entry:
            steps = f"args.stride_{tensor}n, 0"
        return f"{{args.{tensor}_ptr + {self._rows.offset(name)}, {steps}}}"

    def coordinates(self, name: str, row: str, page: str = "") -> str:
        """Returns row, head and batch of a box that begins at a row, as TMA takes them. page: in the place of
        the batch, where rows lie in pages.
        """
        place = self._find_zero(name)
        indices = place.indices
        first, head, batch = (indices.get(role, "") for role in (place.rows, Role.HEAD, Role.BATCH))
        return f"{first + ' + ' if first else ''}{row}, {head or '0'}, {page or batch or '0'}"


def list_key_tiles(kernel: Forward | Decode) -> list[int]:
    """Lists the keys of a tile under some config."""
    return sorted({config.tile_kv for config in kernel.configs})
