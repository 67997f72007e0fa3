"""Where the rows of a matrix lie in memory: the nouns that loads, stores and grids are printed from.

Made by `storage` from the spec's adjectives, part of an `ir.Kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnc.expr.nodes import Expr


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
