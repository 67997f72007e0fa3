"""Lists of blocks that are data: how loops walk over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnc.expr.nodes import Expr

#: lists: of each list of the caller's, the blocks of keys that it names, each once and ascending. columns: of
#: each block of keys, the blocks of queries whose lists name it, ascending. list_bits: of each list a bit for
#: every block of keys that there is, set where the list names it; row_bits: of each block of keys the same,
#: for blocks of queries.
Memory: TypeAlias = Literal["lists", "columns", "list_bits", "row_bits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListWalk:
    """A loop over the tiles of listed blocks.

    memory: holds the lists, each after its length, or their bits; line: which one, negative where there is
    none; stride: of one, in entries or words; block: positions of a block, which tiles divide, unless a tile
    `gathers` keys of several blocks. queries: whose lists one row of bits has, of which a tile has the rows:
    behind the words stands a byte for each block, with a bit for every query that lists it.
    """

    memory: Memory
    line: Expr
    stride: Expr
    block: int
    gathers: bool = False
    knows_full: bool = False
    queries: int = 1
