"""The pieces of a Hopper kernel's text about what TMA copies: boxes of rows of a tensor, or of a page."""

from __future__ import annotations

from math import gcd

from attnc.model.tensors import Role
from attnc.plan.signature import RowZero
from attnc.target.sm80.kernel import CudaText
from attnc.target.sm90.wgmma import Parts, products, wgmma


def coordinates(place: RowZero, row: str, page: str = "") -> str:
    """Row, head and batch of a box that begins at a row, as TMA takes them. page: in the place of the batch,
    where rows lie in pages.
    """
    indices = place.indices
    first, head, batch = (indices.get(role, "") for role in (place.rows, Role.HEAD, Role.BATCH))
    return f"{first + ' + ' if first else ''}{row}, {head or '0'}, {page or batch or '0'}"


class BoxText(CudaText):
    """Attribute by attribute what templates of prefill and of decoding print of tiles and their copies.

    sum_parts: of the columns of o that a warpgroup sums in registers, those of each product.
    """

    sum_parts: Parts

    @property
    def key_tiles(self) -> list[int]:
        """Keys of a tile, over all configs."""
        return sorted({config.tile_kv for config in self.kernel.configs})

    def wgmma(self, columns: int, *, registers: bool, by_rows: bool | None = None) -> str:
        return wgmma(columns, self.ptx, registers=registers, by_rows=by_rows)

    @property
    def sum_columns(self) -> list[int]:
        """Widths of the products that are summed in registers."""
        return list(dict.fromkeys(columns for _, columns in self.sum_parts))

    def value_products(self, accumulate: str) -> list[str]:
        """acc += p v, or acc = p v, of 16 keys."""
        return list(products(self.sum_parts, accumulate))

    @property
    def box(self) -> str:
        """Keys that are copied at once, which lie in one page."""
        last, *others = self.key_tiles
        boxes = [f"BLOCK_N == {tile} ? {gcd(self.page, tile)} : " for tile in others]
        return f"{''.join(boxes)}{gcd(self.page, last)}"

    @property
    def box_rows(self) -> str:
        """The same as declarations say it, or all keys of a tile."""
        return f"gcd({self.page}, BLOCK_N)" if self.page else "BLOCK_N"

    def coordinates(self, name: str, row: str, page: str = "") -> str:
        """Row, head and batch, or page, of a box."""
        return coordinates(self.row_zero(name), row, page)
