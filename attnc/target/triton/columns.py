"""Text of scales of columns of k and v in Triton: one number for each row and block of columns of a tile."""

from __future__ import annotations

from math import gcd

from attnc.plan.conversion import count_alike
from attnc.plan.ir.kernel import KEY_ROW, TILE_COLUMN, ColumnScale
from attnc.target.triton.printer import load, tiled


def scale_tile(tile: str, scale: ColumnScale, first: int, width: int) -> list[str]:
    """Returns statements that multiply a tile by its scales. first: of its columns; width: how many they are,
    a power of two.
    """
    alike = gcd(count_alike(scale), first, width)
    each = alike & -alike  # tiles are cut into powers of two
    column = f"tl.arange(0, {width // each})" + (f" * {each}" if each > 1 else "")
    return [
        f"{KEY_ROW.name} = kv_lo + tl.arange(0, BLOCK_N)",
        f"{TILE_COLUMN.name} = {f'{first} + ' if first else ''}{column}",
        *(f"{fetch.name} = {load(fetch)}" for fetch in scale.fetches),
        f"{tile} = _scale_columns({tile}, {tiled(scale.value)}, {each})",
    ]
