"""Columns of tiles in Triton: names of some, whether some are padding, and the text of scales of columns of k
and v, one number for each row and block of columns of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.plan.conversion import count_alike
from attnc.plan.ir import Module
from attnc.plan.ir.kernel import KEY_ROW, TILE_COLUMN, ColumnScale
from attnc.plan.signature import block, feature, has_wide_values
from attnc.target.kernel_view import parts_of
from attnc.target.triton.printer import load, tiled


@dataclass(frozen=True, slots=True)
class PartText:
    """Names and loads of some columns of q and k."""

    q: str
    k: str
    load_q: str
    load_k: str


@dataclass(frozen=True, slots=True)
class TileColumns:
    """What device functions that move tiles of rows know of columns: how many there are, where a tile has
    more than that. parameter, argument: of such a function; inside: which elements of a tile exist.
    """

    padded: bool

    @property
    def parameter(self) -> str:
        return "D: tl.constexpr, " if self.padded else ""

    @property
    def argument(self) -> str:
        return "D, " if self.padded else ""

    @property
    def inside(self) -> str:
        return "(row[:, None] < stop) & (col[None, :] < D)" if self.padded else "row[:, None] < stop"


def is_padded(module: Module) -> bool:
    """Returns whether some tile has more columns than rows: functions that move rows take both numbers."""
    d, dv = feature(module.variant.attention.k), feature(module.variant.attention.v)
    backward = () if module.backward is None else module.backward.kernels
    pads_do = any(kernel.v_in_k and not kernel.parts for kernel in backward) and d != dv  # to columns of k
    if pads_do or has_wide_values(module.variant.attention):
        return True
    kernels = (module.kernel, *backward)
    widths = {dv, *(part.width for kernel in kernels for part in parts_of(module, kernel))}
    return any(width != block(width) for width in widths)


def widened_to(attention: Attention, name: str) -> DType:
    """Returns what a tile of k or v of 8 bits becomes where it is loaded: the type of q; f16, which is
    nearer, where scales of columns are multiplied before it becomes that.
    """
    return DType.F16 if name in attention.column_scales else attention.element


def scale_tile(tile: str, scale: ColumnScale, first: int, width: int, dtype: str) -> list[str]:
    """Returns statements that multiply a tile by its scales. first: of its columns; width: how many they are,
    a power of two; dtype: of the result.
    """
    alike = gcd(count_alike(scale), first, width)
    each = alike & -alike  # tiles are cut into powers of two
    column = f"tl.arange(0, {width // each})" + (f" * {each}" if each > 1 else "")
    return [
        f"{KEY_ROW.name} = kv_lo + tl.arange(0, BLOCK_N)",
        f"{TILE_COLUMN.name} = {f'{first} + ' if first else ''}{column}",
        *(f"{fetch.name} = {load(fetch)}" for fetch in scale.fetches),
        f"{tile} = _scale_columns({tile}, {tiled(scale.value)}, {each}, {dtype})",
    ]
