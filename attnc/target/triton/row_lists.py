"""The kernels that make lists of rows of memory: what `templates/triton/_lists.py.jinja` prints of what a
query sees besides its list.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import TRUE
from attnc.plan.ir import Module
from attnc.plan.ir.list_making import ListMaking
from attnc.plan.ir.module import ListedRows
from attnc.plan.lists import KV_HEAD
from attnc.plan.steps import tensors_of
from attnc.target.lists import RowLists
from attnc.target.triton.lists import ListsText
from attnc.target.triton.printer import scalar, statement


class RowListsText(RowLists, ListsText):
    """As for lists of keys, of which every program finds its own: `ListedRows`."""

    def __init__(self, module: Module, made: ListMaking, rows: ListedRows) -> None:
        super().__init__(module, made)
        self.rows = rows

    @property
    def indices(self) -> Iterator[str]:
        *_, queries = (self._factor(size) for size in self.rows.lines)
        yield f"{'query_row' if self.rows.packed else 'query'} = line % {queries}"
        rest = f"line // {queries}"
        if self.rows.by_head:
            heads = self._factor(self.rows.lines[1])
            yield f"{KV_HEAD.name} = {rest} % {heads}"
            rest = f"{rest} // {heads}"
        if not self.rows.packed:
            yield f"b = {rest}"
        yield from map(statement, self.rows.program)

    @property
    def offset(self) -> str:
        terms = (
            f"tl.cast({scalar(index)}, tl.int64) * stride_{self.tensor}_{axis}"
            for axis, index in enumerate(self.rows.indices)
        )
        return " + ".join(terms) or "0"

    @property
    def count(self) -> str:
        exists, most, limit = scalar(self.rows.exists), self.entries, self.rows.limit
        found = most if limit is None else f"tl.minimum({scalar(limit)}, {most}).to(tl.int32)"
        return f"tl.where({exists}, {found}, 0)"

    @property
    def keeps(self) -> list[str]:
        if self.rows.keep == TRUE:
            return []
        return [*map(statement, self.rows.fetches), f"named = named & ({scalar(self.rows.keep)})"]

    @property
    def length(self) -> str:
        return f"tl.where({scalar(self.rows.is_query)}, found, -1)" if self.rows.marks else "found"

    @property
    def line_count(self) -> str:
        return " * ".join(self._factor(size) for size in self.rows.lines)

    @property
    def _inputs(self) -> list[tuple[str, int]]:
        read = tensors_of((*self.rows.program, *self.rows.fetches)) | {self.tensor}
        args = {arg.tensor.name: len(arg.tensor.shape) for arg in self.module.args}
        return [(name, rank) for name, rank in args.items() if name in read]
