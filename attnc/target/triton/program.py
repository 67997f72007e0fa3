"""What the text of Triton kernels of all kinds has in common: which tile is a program's, the loops over other
tiles, lists, and what dropout keeps.
"""

from __future__ import annotations

from collections.abc import Iterable

from attnc.expr.construct import ZERO
from attnc.expr.nodes import Expr, Index, Ref
from attnc.plan.decode import decodes_packed_rows
from attnc.plan.ir import Forward, Kernel, Loop, Module
from attnc.plan.ir.lists import ListWalk
from attnc.plan.lists import HIDES_SOME
from attnc.target.kernel_view import sizes_of_kernel
from attnc.target.terms import times
from attnc.target.triton.printer import (
    counter,
    scalar,
    transposed,
    under,
)


class ProgramText:
    """What texts of forward and backward kernels have in common."""

    module: Module
    kernel: Kernel

    def unless_described(self, lines: Iterable[str]) -> list[str]:
        """Returns lines of matrices that are pointers, and no descriptors."""
        return under("not TMA", lines) if self.kernel.tma else [*lines]

    @property
    def size_names(self) -> list[str]:
        return sizes_of_kernel(self.kernel)

    @property
    def tile_count(self) -> str:
        walk, rows = self.kernel.walk, scalar(self.kernel.walk.rows)
        if walk.sequences is not None:
            return f"{rows} // {walk.size} + B + 1"
        return f"{rows} // {walk.size}" if walk.is_padded else f"tl.cdiv({rows}, {walk.size})"

    @property
    def all_heads(self) -> str:
        walk = self.kernel.walk
        return walk.heads if walk.sequences is not None else f"B * {walk.heads}"

    @property
    def reads_h_kv(self) -> bool:
        return self.h_kv != "h" and (self.h_kv != "0" or self.kernel.tma)

    @property
    def h_kv(self) -> str:
        return scalar(self.kernel.kv_head)

    @property
    def find_sequence(self) -> str:
        return self.sequence_of("rank // heads", self.kernel.walk.size)

    def sequence_of(self, number: str, size: str) -> str:
        """Returns the call that finds the sequence of a tile of so many rows, and its place there."""
        sequences = self.kernel.walk.sequences
        assert sequences is not None
        cu, rows = sequences.cu_seqlens, scalar(sequences.rows)
        place = f"{cu}_ptr, stride_{cu}_0, {number}, B, {rows}"
        is_row = decodes_packed_rows(self.module)
        return f"_find_sequence_of_row({place})" if is_row else f"_find_sequence({place}, {size})"

    @property
    def find_query(self) -> list[str]:
        """Statements that find a packed query, whose number is `query_row`, where each has tiles of its own;
        none where queries are not packed.
        """
        if self.kernel.walk.sequences is None:
            return []
        return [
            f"b, q_first, q_rows, q_lo = {self.sequence_of('query_row', '1')}",
            "# what follows the last sequence has rows to write, but no queries",
            "M = tl.where(b < B, q_rows, 0)",
            "b = tl.minimum(b, B - 1)",
        ]

    @property
    def place_of_tile(self) -> list[str]:
        """Lines that find b, the head and the first row of a tile, and the length of a packed sequence."""
        walk = self.kernel.walk
        if walk.sequences is not None:
            head = f"{walk.head} = first_head + rank % heads"
            return [head, *self._place_in_sequence, "b = tl.minimum(b, B - 1)"]
        number = f"({walk.tiles} - 1 - rank // heads)" if walk.last_first else "rank // heads"
        head = "head = first_head + rank % heads"
        batch = [f"b = head // {walk.heads}", f"{walk.head} = head % {walk.heads}"]
        return [f"{walk.lo} = {number} * {walk.size}", head, *batch]

    @property
    def _place_in_sequence(self) -> list[str]:
        """Lines that find the sequence, and the length that it has, of a tile of packed rows."""
        if self.kernel.walk.axis == "q":
            found, why = "b, q_first, q_rows, q_lo", "has rows to write, but no queries"
            length = "M = tl.where(b < B, q_rows, 0)"
        else:
            found, why, length = "b, k_first, N, kv_lo", "has no keys", "N = tl.where(b < B, N, 0)"
        return [f"{found} = {self.find_sequence}", f"# what follows the last sequence {why}", length]

    @property
    def query_count(self) -> str:
        sequences = self.kernel.walk.sequences
        assert sequences is not None
        rows = scalar(sequences.rows)
        return rows if decodes_packed_rows(self.module) else f"({rows} + B + 1)"

    def keys_of(self, loop: Loop) -> str:
        """Returns the range of a loop over keys. The tile or two at an edge are not worth filling a
        pipeline.
        """
        if loop.listed is not None:
            return self._listed_tiles(loop.listed, loop.start)
        bounds = f"{scalar(loop.start)}, {scalar(loop.stop)}, BLOCK_N"
        is_edge = loop.zero_fill and self.fills_when == "ZERO_FILL"
        return f"tl.range({bounds}, num_stages=1)" if is_edge else f"range({bounds})"

    def queries_of(self, loop: Loop) -> str:
        if loop.listed is not None:
            return self._listed_tiles(loop.listed)
        return f"range({scalar(loop.start)}, {scalar(loop.stop)}, BLOCK_M)"

    def walks_by(self, loop: Loop) -> str:
        return "list_item" if loop.listed is not None else f"{self.kernel.regions.axis}_lo"

    def _listed_tiles(self, walk: ListWalk, start: Expr = ZERO) -> str:
        """start: where a split begins, of the keys that the list names."""
        if start != ZERO:
            tiles = "split_lo // BLOCK_N, split_hi // BLOCK_N"
            return f"range({'split_lo, split_hi, BLOCK_N' if walk.gathers else tiles})"
        if walk.gathers:
            return f"range(0, {times('listed', walk.block)}, BLOCK_N)"
        return f"range(0, listed * ({walk.block} // {self._inner_tile}))"

    @property
    def gathers(self) -> bool:
        return any(loop.listed is not None and loop.listed.gathers for loop in self.kernel.regions.loops)

    @property
    def _inner_tile(self) -> str:
        return "BLOCK_N" if self.kernel.regions.axis == "kv" else "BLOCK_M"

    @property
    def find_list(self) -> list[str]:
        walk = next((loop.listed for loop in self.kernel.regions.loops if loop.listed is not None), None)
        if walk is None:
            return []
        at = f"tl.cast({scalar(walk.line)}, tl.int64) * ({scalar(walk.stride)})"
        return [
            f"list_row = _{walk.memory}_ptr + {at}",
            f"listed = _list_length(list_row, {scalar(walk.line)} >= 0)",
        ]

    def find_tile(self, loop: Loop) -> str:
        assert loop.listed is not None
        block, tile = loop.listed.block, self._inner_tile
        if loop.listed.gathers:
            listed = times("listed", block)
            return f"kv_idx = _find_keys(list_row + 1, list_item, {listed}, N, BLOCK_N, {block})"
        entry = f"_list_entry(list_row + 1 + list_item // ({block} // {tile}))"
        at = f"{self.kernel.regions.axis}_lo = {{}} * {block} + list_item % ({block} // {tile}) * {tile}"
        if not loop.listed.knows_full:
            return at.format(entry)
        return (
            f"list_entry = {entry}\n{at.format('list_entry // 2')}\n{HIDES_SOME.name} = list_entry % 2 != 0"
        )

    @property
    def list_pointers(self) -> list[str]:
        found = (loop.listed.memory for loop in self.kernel.regions.loops if loop.listed is not None)
        return [f"_{memory}_ptr" for memory in found]

    @property
    def fills_when(self) -> str:
        partial = [loop for loop in self.kernel.regions.loops if loop.masked is not False]
        if not any(loop.zero_fill for loop in partial):
            return ""
        if not all(loop.zero_fill for loop in partial):
            return "ZERO_FILL"
        return "MASKED" if all(loop.masked is True for loop in partial) else "True"

    @property
    def kept_rows(self) -> str:
        kept = self.kernel.step.kept
        assert kept is not None
        return transposed(kept)

    @property
    def keep_scale(self) -> str:
        assert self.kernel.softmax.dropout is not None
        p = scalar(self.kernel.softmax.dropout.p)
        return f"tl.where({p} < 1.0, 1.0 / (1.0 - {p}), 0.0)"

    @property
    def keep_drawn(self) -> str:
        """Which elements of a tile are kept."""
        drop = self.kernel.softmax.dropout
        assert drop is not None
        drawn = f"{scalar(drop.p)}, {scalar(drop.seed)}, b, {counter(drop.head)}"
        return f"_keep_dropout({drawn}, q_idx, kv_lo, BLOCK_M, BLOCK_N)"

    @property
    def keep_listed(self) -> str:
        """Which elements of a tile dropout keeps, where lists name its keys and its rows are heads."""
        dropout, lists = self.kernel.softmax.dropout, self.module.lists
        assert dropout is not None
        assert lists is not None
        head = scalar(dropout.head)
        heads = head if isinstance(dropout.head, Index | Ref) else f"({head}).to(tl.int32)"
        if isinstance(self.kernel, Forward) or self.kernel.pack is None:
            heads += " + tl.zeros([BLOCK_M], tl.int32)"
        in_a_row = self.kernel.structure == "decode" and not self.gathers
        keys = "kv_lo + tl.arange(0, BLOCK_N)" if in_a_row else "kv_idx"
        drawn = f"{scalar(dropout.p)}, {scalar(dropout.seed)}, b, {heads}, q_idx, {keys}"
        return f"_keep_listed({drawn}, BLOCK_M, BLOCK_N, {16 if lists.keys % 16 == 0 else 1})"
