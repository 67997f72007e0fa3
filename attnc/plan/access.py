"""Where the rows of a matrix lie in memory, and which tile comes when: the nouns that loads, stores and grids
are printed from.

Programs of one head read the same K and V, or in a backward the same q and do. A grid walks over the tiles of
one section of heads after the other, so that the programs' reads stay in the L2 cache. How many heads that
are is decided here, as a part of the cache of a device that is known when a kernel is called; modules declare
it, and `support.sizes` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attnc.expr.nodes import Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """How many heads a section has: as many as fill a part of the L2 cache.

    cache: that part, a quotient; least, most: the fewest and the most, unless there are fewer heads.
    """

    cache: tuple[int, int]
    least: int = 1
    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSection:
    """How large the last section is, so that what begins last is short. rounds: tiles that it has for each
    block, at least, 0: it is like the others; sections: of ordinary size that it has at most, 0: any number;
    before: those before it, at least.
    """

    rounds: int = 0
    sections: int = 0
    before: int = 1


ALIKE = LastSection()

#: Others need the cache too, and programs are not all at the same tile.
A_QUARTER = Section(cache=(1, 4), least=4, most=16)
#: The same where loops are short, so that a program reads few rows of a head: more heads than would fit.
SHORT_LOOPS = Section(cache=(1, 4), least=16, most=16)
HALF = Section(cache=(1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of q, k, v or o of the sequence at hand.

    tensor: the argument that holds them (`k` for a v that is a prefix of k); first: the scalar that numbers
    their first row in a tensor without a batch axis; table, table_stride: the sequence's row of the block
    table and the distance of its entries; page: rows of a page, 0 where there are none.
    """

    tensor: str
    first: str | None = None
    table: str = ""
    table_stride: str = ""
    page: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Ragged queries: tiles are cut from sequences that follow each other in `rows` rows.

    Tile number t belongs to the sequence b with cu_seqlens[b] // BLOCK_M + b <= t < cu_seqlens[b + 1] //
    BLOCK_M + b + 1: at least as many numbers as the sequence has tiles, so that a grid sized from the shapes
    alone covers any lengths, and a few programs find nothing to do. Number B is what follows the last
    sequence: its rows see no key.
    """

    cu_seqlens: str
    rows: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class TileWalk:
    """What the number of a tile says: the batch entry, the head and the first row.

    Tiles are numbered section of heads by section (`Section`), and in one by `rank`: a tile of every
    head, then the next of each; the last ones first where they have the most work (`last_first`). Those of a
    decode kernel are few, and numbered head by head.

    axis: of the tiles; rows: of a head, which tiles divide where they are padded, of all sequences if
    `sequences` are packed; head: the index that numbers heads with tiles of their own, of which a sequence
    has `heads`, "" where it has one; group: so many query heads of a KV head fill its tiles, row = query *
    group + head of the group, None where a row is a query; writes_all_rows: a program writes all rows of its
    tile that are in memory, also those behind the end of its sequence.
    """

    axis: Literal["q", "kv"]
    rows: Expr
    is_padded: bool
    head: Literal["h", "h_kv", ""]
    heads: Literal["H", "Hkv"]
    sequences: Sequences | None
    last_first: bool
    writes_all_rows: bool
    group: Expr | None = None

    @property
    def size(self) -> str:
        return "BLOCK_M" if self.axis == "q" else "BLOCK_N"

    @property
    def lo(self) -> str:
        return f"{self.axis}_lo"

    @property
    def tiles(self) -> str:
        return f"{self.axis}_tiles"
