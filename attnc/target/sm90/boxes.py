"""The pieces of a Hopper kernel's text about what TMA copies: boxes of rows of a tensor, or of a page."""

from __future__ import annotations

from math import gcd

from attnc.expr.nodes import Const
from attnc.model.tensors import Role
from attnc.target.sm80.kernel import CudaText
from attnc.target.sm90.wgmma import Parts, products, wgmma


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
        rows = self.rows(name)
        tensors = (arg.tensor for arg in (*self.module.args, *self.module.outputs))
        tensor = next(tensor for tensor in tensors if tensor.name == rows.tensor)
        row = row if rows.first is None else f"{rows.first} + {row}"
        is_key = name in ("k", "v")
        has_head = tensor.axis(Role.HEAD) is not None and not (is_key and self.kernel.kv_head == Const(0))
        head = ("h" if not is_key or self.h_kv == "h" else "h_kv") if has_head else "0"
        has_batch = tensor.axis(Role.BATCH) is not None and rows.first is None
        return f"{row}, {head}, {page or ('b' if has_batch else '0')}"
