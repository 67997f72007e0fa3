"""What is made of lists of blocks before kernels walk over them: of a caller's, or of those of a mask."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.expr.nodes import TRUE, Dim, Expr, Load, walk
from attnc.plan.ir.kernel import Axis, Statement

#: Sizes that kernels of lists have anyway.
_OWN = ("list_blocks", "list_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """The least, or the most, that an integer is among the queries of a list, or the keys of a block: `axis`
    says which. is_wide: it is of 64 bits.
    """

    name: str
    value: Expr
    axis: Axis
    is_most: bool
    is_wide: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBlocks:
    """Which pairs of a query and a key a mask keeps, where lists have the blocks that it keeps one of.

    program: what is found first, of a sequence `b` and a K/V head `h_kv`; of_queries: of the query `query`;
    of_keys: of the key `kv_idx`; of_pairs: of both; keep: of these, whether a pair is kept. lo, hi: keys
    before and from which on no query from `first_query` to `last_query` keeps one. may: of ends, whether a
    block can have a pair that is kept; sure: whether what is looked up excludes none of it, FALSE where ends
    do not tell; full: whether nothing else does, of keys from `first_key` to `last_key`. inputs: the tensors
    that are read, each with the number of its axes; dims: sizes that are.
    """

    program: tuple[Statement, ...]
    of_queries: tuple[Statement, ...]
    of_keys: tuple[Statement, ...]
    of_pairs: tuple[Statement, ...]
    keep: Expr
    lo: Expr
    hi: Expr
    ends: tuple[Extreme, ...]
    may: Expr
    sure: Expr
    full: Expr
    inputs: tuple[tuple[str, int], ...]
    dims: tuple[str, ...]

    def ends_of(self, axis: Axis) -> tuple[Extreme, ...]:
        return tuple(end for end in self.ends if end.axis == axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListMaking:
    """What is made of the caller's lists before a kernel walks over them: `Memory`.

    tensor: has them along its last axis; extents: its sizes; keys: of a block; limit: entries that count, of
    each list or of all, None: all. rows: queries of a block, 0 where lists have no axis of such; row_axis:
    which one that is. Its last rows may lie past the queries that there are. by_entry: blocks are left in the
    order of the list, for they are many more than entries; is_distinct: no list names one twice. kept: what
    lists are found of that no caller passes. queries: whose lists a tile has, as `ListWalk` says; places:
    which list of the caller's one of them has; exists: whether there is one.
    """

    tensor: str
    extents: tuple[Expr, ...]
    keys: int
    limit: Load | Expr | None
    rows: int
    row_axis: int | None
    by_entry: bool = False
    is_distinct: bool = False
    kept: KeptBlocks | None = None
    queries: int = 1
    places: tuple[Expr, ...] = ()
    exists: Expr = TRUE

    @property
    def lines(self) -> tuple[Expr, ...]:
        return self.extents[:-1]

    @property
    def stride(self) -> str:
        return f"stride_{self.tensor}_{len(self.lines)}"

    @property
    def groups(self) -> tuple[Expr, ...]:
        return tuple(size for axis, size in enumerate(self.lines) if axis != self.row_axis)

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """The tensors that are read, each with the number of its axes: the lists, and what counts entries."""
        if self.kept is not None:
            return self.kept.inputs
        limit = ((self.limit.tensor, len(self.limit.indices)),) if isinstance(self.limit, Load) else ()
        return ((self.tensor, len(self.extents)), *limit)

    @property
    def dims(self) -> tuple[str, ...]:
        if self.kept is not None:
            return tuple(name for name in self.kept.dims if name not in _OWN)
        used = (node.name for size in self.extents for node in walk(size) if isinstance(node, Dim))
        return tuple(dict.fromkeys(used))
