"""The kernels that make lists of rows of memory: what `templates/triton/_lists.py.jinja` prints of what a
query sees besides its list.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.construct import ZERO
from attnc.expr.nodes import TRUE
from attnc.plan.ir import Module
from attnc.plan.ir.lists import ListMaking
from attnc.plan.ir.module import ListedRows
from attnc.plan.lists import KV_HEAD
from attnc.plan.steps import tensors_of
from attnc.target.declaration import show_product
from attnc.target.triton.lists import ListsText
from attnc.target.triton.printer import scalar, statement


class RowListsText(ListsText):
    """As for lists of keys, of which every program finds its own: `ListedRows`."""

    def __init__(self, module: Module, made: ListMaking, rows: ListedRows) -> None:
        super().__init__(module, made)
        self._rows = rows

    @property
    def indices(self) -> Iterator[str]:
        """Statements from the number of a list to its query and sequence."""
        *_, queries = (self._factor(size) for size in self._rows.lines)
        yield f"{'query_row' if self._rows.packed else 'query'} = line % {queries}"
        rest = f"line // {queries}"
        if self._rows.by_head:
            heads = self._factor(self._rows.lines[1])
            yield f"{KV_HEAD.name} = {rest} % {heads}"
            rest = f"{rest} // {heads}"
        if not self._rows.packed:
            yield f"b = {rest}"
        yield from map(statement, self._rows.program)

    @property
    def offset(self) -> str:
        terms = (
            f"tl.cast({scalar(index)}, tl.int64) * stride_{self.tensor}_{axis}"
            for axis, index in enumerate(self._rows.indices)
        )
        return " + ".join(terms) or "0"

    @property
    def count(self) -> str:
        exists, most, limit = scalar(self._rows.exists), self.entries, self._rows.limit
        found = most if limit is None else f"tl.minimum({scalar(limit)}, {most}).to(tl.int32)"
        return f"tl.where({exists}, {found}, 0)"

    @property
    def stop(self) -> str:
        return "N"

    @property
    def keeps(self) -> list[str]:
        """Statements that find which of the keys `kv_idx` are kept."""
        if self._rows.keep == TRUE:
            return []
        return [*map(statement, self._rows.fetches), f"named = named & ({scalar(self._rows.keep)})"]

    def place(self, key: str) -> str:
        return key if self._rows.first == ZERO else f"{scalar(self._rows.first)} + {key}"

    @property
    def length(self) -> str:
        return f"tl.where({scalar(self._rows.is_query)}, found, -1)" if self._rows.marks else "found"

    @property
    def line_count(self) -> str:
        return " * ".join(self._factor(size) for size in self._rows.lines)

    @property
    def _inputs(self) -> list[tuple[str, int]]:
        read = tensors_of((*self._rows.program, *self._rows.fetches)) | {self.tensor}
        args = {arg.tensor.name: len(arg.tensor.shape) for arg in self.module.args}
        return [(name, rank) for name, rank in args.items() if name in read]

    @property
    def sizes(self) -> list[str]:
        return list(dict.fromkeys((*super().sizes, *self._rows.dims)))

    @property
    def _lines(self) -> str:
        return show_product(self._rows.lines)
