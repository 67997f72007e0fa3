"""Lists of blocks that are data: how loops walk over them, and what is made of them first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnc.expr.nodes import Dim, Expr, Load, walk

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
    `gathers` keys of several blocks.
    """

    memory: Memory
    line: Expr
    stride: Expr
    block: int
    gathers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListMaking:
    """What is made of the caller's lists before a kernel walks over them: `Memory`.

    tensor: has them along its last axis; extents: its sizes; keys: of a block; limit: entries that count, of
    each list or of all, None: all. rows: queries of a block, 0 where lists have no axis of such; row_axis:
    which one that is. Its last rows may lie past the queries that there are. by_entry: blocks are left in the
    order of the list, for they are many more than entries; is_distinct: no list names one twice.
    """

    tensor: str
    extents: tuple[Expr, ...]
    keys: int
    limit: Load | Expr | None
    rows: int
    row_axis: int | None
    by_entry: bool = False
    is_distinct: bool = False

    @property
    def lines(self) -> tuple[Expr, ...]:
        return self.extents[:-1]

    @property
    def stride(self) -> str:
        """What kernels call the distance from one entry of a list to the next."""
        return f"stride_{self.tensor}_{len(self.lines)}"

    @property
    def groups(self) -> tuple[Expr, ...]:
        return tuple(size for axis, size in enumerate(self.lines) if axis != self.row_axis)

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """The tensors that are read, each with the number of its axes: the lists, and what counts entries."""
        limit = ((self.limit.tensor, len(self.limit.indices)),) if isinstance(self.limit, Load) else ()
        return ((self.tensor, len(self.extents)), *limit)

    @property
    def dims(self) -> tuple[str, ...]:
        used = (node.name for size in self.extents for node in walk(size) if isinstance(node, Dim))
        return tuple(dict.fromkeys(used))
