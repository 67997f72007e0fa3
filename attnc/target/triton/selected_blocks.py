"""Text of the kernel for dk and dv of blocks that queries select: attribute by attribute what
`templates/triton/selected_dkdv.py.jinja` prints.
"""

from __future__ import annotations

from attnc.expr.nodes import show
from attnc.plan.lists import lists_packed_rows
from attnc.target.terms import factor, times
from attnc.target.triton.printer import scalar
from attnc.target.triton.selected import KeysText, SelectedParameters


class BlockParameters(SelectedParameters):
    """Parameters of a kernel that owns tiles of blocks."""

    @property
    def programs(self) -> str:
        assert self.module.lists is not None
        keys = self.module.lists.keys
        tiles, sequences = f"cdiv({keys}, BLOCK_N)", self.kernel.grid.sequences
        if sequences is not None:
            return times(f"({show(sequences.rows)} // {keys} + B + 1) * {tiles}", self.kv_heads)
        return times(f"list_blocks * {tiles} * B", self.kv_heads)


class BlockText(KeysText):
    """Text of a kernel that owns a tile of a block: rows of q are the heads of queries that list it."""

    parameters_type = BlockParameters
    row_names = ("list_row", "row_lo", "stop")

    @property
    def keys(self) -> int:
        assert self.module.lists is not None
        return self.module.lists.keys

    @property
    def find_list(self) -> list[str]:
        found = super().find_list
        if self.kernel.walk.sequences is None:
            return found
        return [*found[:-1], "listed = _list_length(list_row, (list_line >= 0) & (kv_lo < N_all))"]

    @property
    def block_count(self) -> str:
        sequences = self.kernel.walk.sequences
        assert sequences is not None
        return f"{scalar(sequences.rows)} // {self.keys} + B + 1"

    @property
    def lists_packed_rows(self) -> bool:
        return lists_packed_rows(self.module.variant.attention)

    @property
    def rows_of_entry(self) -> str:
        (loop,) = self.kernel.regions.loops
        assert loop.listed is not None
        return self.group if loop.listed.block == 1 else f"{loop.listed.block} * {factor(self.group)}"

    def find_rows(self, number: str) -> list[str]:
        (loop,) = self.kernel.regions.loops
        assert loop.listed is not None
        group, block = factor(self.group), loop.listed.block
        at = f"list_row + 1 + row // {factor(self.rows_of_entry)}"
        query = "entry" if block == 1 else f"entry * {block} + row // {group} % {block}"
        query += " - q_first" if self.lists_packed_rows else ""
        return [
            f"row = row_lo + {number}",
            f"h = h_kv * {group} + row % {group}",
            f"entry = tl.load({at}, mask=row < stop, other=0.0).to(tl.int32, bitcast=True)",
            f"q_idx = tl.where(row < stop, {query}, M)",
        ]
