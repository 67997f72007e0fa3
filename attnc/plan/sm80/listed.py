"""Tiles of kernels that walk over listed blocks: they divide these, and warps share them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import product
from math import gcd
from typing import TypeVar

from attnc.model.attention import Attention
from attnc.model.schedule import Schedule, TileConfig
from attnc.plan.fitting import Misfit
from attnc.plan.lists import listing_of, packs_heads
from attnc.plan.sm80.layout import MMA

C = TypeVar("C", bound=TileConfig)
#: Queries and keys of a block, 0 where any tile does.
Block = tuple[int, int]


def block_of(attention: Attention, schedule: Schedule | None = None) -> Block:
    """Returns the block that tiles divide. schedule: of a forward, whose tiles may have rows of one query."""
    listing = listing_of(attention)
    if listing is None:
        return 0, 0
    rows = 0 if schedule is not None and packs_heads(schedule) else listing.rows
    return rows, listing.keys


def cuts_blocks(config: TileConfig, block: Block) -> str:
    """Returns why tiles of a config cross the blocks that a mask lists, "" if they do not."""
    tiles = ("tile.q", config.tile_q, "queries"), ("tile.kv", config.tile_kv, "keys")
    for (key, tile, what), size in zip(tiles, block, strict=True):
        if size % tile:
            return f"{key} = {tile} does not divide the listed blocks of {size} {what}"
    return ""


def name_block(reason: str, block: Block, said: Collection[str]) -> str:
    """Returns why a config fits nothing, and the block that its tile divides, where the schedule says no
    tile.
    """
    for (key, what), size in zip((("tile.q", "queries"), ("tile.kv", "keys")), block, strict=True):
        if size and key not in said and reason.startswith(f"{key} = "):
            return f"{reason}: listed blocks have {size} {what}"
    return reason


def adapt(config: C, block: Block, said: Collection[str], misfit: Misfit[C]) -> C:
    """Returns a config with the largest tiles that divide blocks, and as many warps as can share them, as
    far as a schedule has not said them.
    """
    rows, keys = block
    if not keys:
        return config
    tiles_q = [gcd(config.tile_q, rows)] if rows and "tile.q" not in said else [config.tile_q]
    while "tile.q" not in said and tiles_q[-1] > MMA and tiles_q[-1] % 2 == 0:
        tiles_q.append(tiles_q[-1] // 2)
    parts = [part for part in range(config.tile_kv, 0, -MMA) if keys % part == 0] or [MMA]
    tiles_kv = [config.tile_kv] if "tile.kv" in said else parts
    warps = [config.warps] if "warps" in said else range(config.warps, 0, -1)
    tried = [
        replace(config, tile_q=q, tile_kv=kv, warps=count)
        for q, kv, count in product(tiles_q, tiles_kv, warps)
    ]
    return next((config for config in tried if misfit(config) is None), tried[0])
