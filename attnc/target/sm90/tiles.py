"""Text of what is copied and what wgmma multiplies: boxes of rows of a tensor or of a page, single rows, and
functions around one wgmma instruction, whose operands are named one by one, so that each width has one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from math import gcd
from typing import TypeAlias

from attnc.model.tensors import Role
from attnc.plan.signature import RowZero
from attnc.plan.sm80.layout import MMA, CudaLayout
from attnc.plan.sm90.layout import PIECE
from attnc.target.sm80.kernel import CudaText

#: Columns before those of a product, and its own.
Parts: TypeAlias = tuple[tuple[int, int], ...]

#: Registers of a line, and pieces of four.
_LINE, _PIECES = 16, 8
_FUNCTION = "__device__ __forceinline__ void"


def wgmma(
    columns: int, ptx: str, *, registers: bool, by_rows: bool | None = None, name: str = "wgmma"
) -> str:
    """d += a b, or d = a b: 64 x `columns` from 64 x 16 times 16 x `columns`.

    registers: a lies in registers, and rows of b are its depth (p v); else both lie in shared memory, and
    rows of b are columns of the result (q k^T). by_rows: whether rows of b are its depth, where that is not
    so: both in shared memory (ds k), in a function that is called as `wgmma<false, true>`, or a in registers
    (q k^T), called as `wgmma<false>`. ptx: the type of a and b; name: of the function.
    """
    count = columns // 2
    results = [f"%{i}" for i in range(count)]
    outputs = [f"WGMMA_REGISTERS({j})" for j in range(count // 4)]
    if registers:
        a_type, a_inputs, a = (
            "const u32 (&a)[4]",
            ", ".join(f'"r"(a[{i}])' for i in range(4)),
            f"{{ {', '.join(f'%{count + i}' for i in range(4))} }}",
        )
        b, flag, tail = count + 4, count + 5, "1, 1, 1"
        what, template = "a in registers, b by rows", ""
        if by_rows is False:
            tail, what, template = "1, 1, 0", "a in registers, b transposed", "template <bool B_BY_ROWS>"
    else:
        a_type, a_inputs, a = "u64 a", '"l"(a)', f"%{count}"
        b, flag, tail = count + 1, count + 2, "1, 1, 0, 0"
        what, template = "both in shared memory, b transposed", ""
        if by_rows:
            tail, what = "1, 1, 0, 1", "both in shared memory, b by rows"
            template = "template <bool A_BY_ROWS, bool B_BY_ROWS>"
    lines = [
        f"// d += a b, or d = a b, of {columns} columns: {what}.",
        *([template] if template else []),
        f"{_FUNCTION} {name}(float (&d)[{columns // 8}][4], {a_type}, u64 b, bool accumulate)",
        "{",
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{flag}, 0;\\n"',
        f'                 "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{ptx}.{ptx} {{ "',
    ]
    for i in range(0, count, _LINE):
        some = ", ".join(results[i : i + _LINE])
        end = " }, " if i + _LINE >= count else ", "
        lines.append(f'                 "{some}{end}"')
    lines.append(f'                 "{a}, %{b}, p, {tail}; }}"')
    for j in range(0, len(outputs), _PIECES):
        start = "                 : " if j == 0 else "                   "
        end = "," if j + _PIECES < len(outputs) else ""
        lines.append(f"{start}{', '.join(outputs[j : j + _PIECES])}{end}")
    lines.append(f'                 : {a_inputs}, "l"(b), "r"((int)accumulate));')
    lines.append("}")
    return "\n".join(lines)


def parts_of(columns: int, widest: int) -> Parts:
    """Cuts a sum into products whose results fit the registers that a thread starts with."""
    step = columns if columns <= widest else widest // PIECE * PIECE
    return tuple((first, min(step, columns - first)) for first in range(0, columns, step))


def products(parts: Parts, accumulate: str) -> Iterator[str]:
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


def coordinates(place: RowZero, row: str, page: str = "") -> str:
    """Row, head and batch of a box that begins at a row, as TMA takes them. page: in the place of the batch,
    where rows lie in pages.
    """
    indices = place.indices
    first, head, batch = (indices.get(role, "") for role in (place.rows, Role.HEAD, Role.BATCH))
    return f"{first + ' + ' if first else ''}{row}, {head or '0'}, {page or batch or '0'}"


class ColumnsText:
    """Columns of rows where a kernel's D and DV are those of products (`CudaLayout.d_multiplied`)."""

    layout: CudaLayout

    @property
    def d_stored(self) -> str:
        """Of q and k."""
        return "D" if self.layout.d == self.layout.d_multiplied else str(self.layout.d)

    @property
    def dv_stored(self) -> str:
        """Of v and o."""
        return "DV" if self.layout.dv == self.layout.dv_multiplied else str(self.layout.dv)


class BoxText(ColumnsText, CudaText):
    """Attribute by attribute what templates of prefill and of decoding print of tiles and their copies.

    sum_parts: of the columns of o that a warpgroup sums in registers, those of each product.
    """

    sum_parts: Parts

    @property
    @abstractmethod
    def maps(self) -> list[str]:
        """Tensors that TMA copies, whose maps are arguments."""

    @property
    @abstractmethod
    def copies_rows(self) -> bool:
        """Whether keys come row by row, by cp.async."""

    @property
    def copied_columns(self) -> str:
        """Columns of a tile that are written, where keys come row by row: as many as are multiplied."""
        return f"(COLUMNS + {MMA - 1}) / {MMA} * {MMA}" if self.padded else "COLUMNS"

    @property
    def is_copied(self) -> str:
        """Whether a chunk of a row comes from memory, and is not zeros."""
        return f"from != 0{' && column_of(panel) + 8 * chunk < COLUMNS' if self.padded else ''}"

    @property
    def fields(self) -> Iterator[str]:
        """Declarations of the arguments: tensor maps, pointers, strides, sizes."""
        if self.maps:
            yield f"TensorMap {', '.join(f'{name}_map' for name in self.maps)};"
        yield from super().fields

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

    def pool(self, name: str) -> str:
        """Returns where rows of K or V of the head at hand lie: in page 0, and what follows."""
        tensor = self.rows(name).tensor
        return f"{{args.{tensor}_ptr + {self.offset(name)}, args.stride_{tensor}p, args.stride_{tensor}n}}"

    def coordinates(self, name: str, row: str, page: str = "") -> str:
        """Row, head and batch, or page, of a box."""
        return coordinates(self.row_zero(name), row, page)
