"""The kernel that makes lists of rows of memory of lists of keys: what `templates/sm90/_list_keys.cu.jinja`
prints of what a query sees besides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

from attnc.expr.construct import conj
from attnc.expr.nodes import TRUE, And, Expr
from attnc.model.dtypes import DType
from attnc.plan.ir import Let, Module, Statement, statement_expressions
from attnc.plan.ir.list_making import ListMaking
from attnc.plan.ir.module import ListedRows
from attnc.plan.lists import KV_HEAD
from attnc.plan.steps import names_of
from attnc.target.lists import RowLists
from attnc.target.sm80.lists import CudaListsText
from attnc.target.sm80.printer import local, scalar, sizes_of_call, statement
from attnc.target.sm80.united_blocks import UnitedBlocksText


class CudaRowListsText(RowLists, CudaListsText):
    """As for lists of keys, of which every program finds its own: `ListedRows`."""

    by_row = True

    def __init__(
        self, module: Module, made: ListMaking, dtypes: Mapping[str, DType], rows: ListedRows
    ) -> None:
        self.rows = rows
        super().__init__(module, made, dtypes)

    def _statement(self, item: Statement, sizes: tuple[str, ...]) -> str:
        return statement(item, dict(self._dtypes), sizes, scalar)

    @property
    def queries(self) -> int:
        return self.rows.queries

    @property
    def indices(self) -> Iterator[str]:
        """Statements from the number of a list to its query and sequence; of several queries, to the first
        one and what they have alike.
        """
        yield from sizes_of_call(name for name in self.rows.dims if name not in self._shortened)
        *_, queries = map(self._size, self.rows.lines)
        name, own = "query_row" if self.rows.packed else "query", f"line % {queries}"
        if self.queries > 1:
            name, own = "row_lo" if self.rows.packed else "query_lo", f"{own} * {self.queries}"
        names, rest = {name: own}, f"line / {queries}"
        if self.rows.by_head:
            heads = self._size(self.rows.lines[1])
            names |= {KV_HEAD.name: f"{rest} % {heads}"}
            rest = f"{rest} / {heads}"
        of_line = local("const int", names | ({} if self.rows.packed else {"b": rest}))
        if self._has_runs:
            yield of_line
            return
        yield from self._lengths
        yield of_line
        yield from self._program(self._of_query)

    @property
    def of_sequence(self) -> Iterator[str]:
        yield from self._lengths
        yield local("const int", query_row="row_lo + first_place")
        yield from self._program(self._of_query)

    @property
    def of_query(self) -> Iterator[str]:
        name, first = ("query_row", "row_lo") if self.rows.packed else ("query", "query_lo")
        yield local("const int", {name: f"{first} + place"})
        yield from self._program({item.name for item in self.rows.program} - self._of_query)

    @property
    def _has_runs(self) -> bool:
        return self.rows.packed and self.queries > 1

    @property
    def _shortened(self) -> set[str]:
        return {item.name for item in self.rows.program if isinstance(item, Let)} & {*self.rows.dims}

    @property
    def _lengths(self) -> Iterator[str]:
        yield from sizes_of_call((name for name in self.rows.dims if name in self._shortened), "int")

    def _program(self, without: Collection[str]) -> Iterator[str]:
        declared = self._shortened
        for item in self.rows.program:
            if item.name in without:
                continue
            if isinstance(item, Let) and item.name in ("M", "N") and item.name not in declared:
                declared |= {item.name}
                yield f"int {item.name} = {scalar(item.value)};"
            else:
                yield self._statement(item, tuple(declared))

    @cached_property
    def _of_query(self) -> set[str]:
        """What differs between the queries of a list; their sequence does not."""
        found = {"query", "query_row"} if self.queries > 1 else set()
        for item in self.rows.program if self.queries > 1 else ():
            is_sequence = item.name == "sequence"
            if not is_sequence and found & set().union(*map(names_of, statement_expressions(item))):
                found.add(item.name)
        return found

    @property
    def offset(self) -> str:
        terms = (
            f" + ({scalar(index)}) * args.stride_{self.tensor}_{axis}"
            for axis, index in enumerate(self.rows.indices)
        )
        return "".join(terms)

    @property
    def count(self) -> str:
        most, found = self._size(self.made.extents[-1]), self.rows.limit
        exists = scalar(self.rows.exists)
        if found is None:
            return f"{exists} ? {most} : 0"
        limit = scalar(found)
        return f"!({exists}) ? 0 : {limit} < {most} ? (int)({limit}) : {most}"

    @property
    def piece(self) -> int:
        return math.gcd(self.made.keys, 32) if self.made.keys > 1 else 0

    @property
    def most(self) -> Expr:
        return self.rows.entries

    @property
    def stride(self) -> Expr:
        return self.rows.stride

    @property
    def found(self) -> str:
        marks = self.rows.marks and self.queries == 1
        return f"{scalar(self.rows.is_query)} ? found : -1" if marks else "found"

    @property
    def end(self) -> str:
        return "max(list_length, 0)" if self.rows.marks and self.queries == 1 else "list_length"

    @property
    def counts_queries(self) -> bool:
        return self.rows.marks and self.queries > 1

    @property
    def of_queries(self) -> str:
        terms = self.rows.is_query.operands if isinstance(self.rows.is_query, And) else (self.rows.is_query,)
        return scalar(conj(*(term for term in terms if not names_of(term) & self._of_query)))

    @property
    def keeps(self) -> list[str]:
        if self.rows.keep == TRUE:
            return []
        loads = (self._statement(fetch, ()) for fetch in self.rows.fetches)
        return [
            "auto keeps = [&](int kv_idx) {",
            *(f"    {line}" for line in loads),
            f"    return {scalar(self.rows.keep)};",
            "};",
        ]

    @property
    def pages(self) -> list[str]:
        page, size = self.rows.page, self.rows.page_rows
        if page is None or size is None:
            return []
        first = f"{'before + ' if self._has_runs else ''}threadIdx.x"
        return [
            f"for (int i = {first}; i < found; i += THREADS) {{",
            "    const int kv_idx = row[1 + i];",
            f"    {self._statement(page, ())}",
            f"    row[1 + i] = (int){page.name} * {scalar(size)} + kv_idx % {scalar(size)};",
            "}",
        ]

    @property
    def page_rows(self) -> str:
        found: Expr | None = self.rows.page_rows
        return "" if found is None else self._size(found)


def lists_text(module: Module, dtypes: Mapping[str, DType]) -> CudaListsText | None:
    """Returns the text of the kernel that brings keys of lists into order, None where there are no lists."""
    if module.lists is None:
        return None
    if module.listed_rows is not None:
        return CudaRowListsText(module, module.lists, dtypes, module.listed_rows)
    if module.lists.queries > 1:
        return UnitedBlocksText(module, module.lists, dtypes)
    return CudaListsText(module, module.lists, dtypes)


def in_sequence_of(module: Module, row: str) -> str:
    """Returns the condition that a query with a list of rows is one of a sequence, "" where all are. row: the
    number of a thread's row in its tile.
    """
    rows = module.listed_rows
    if rows is None or not rows.marks:
        return ""
    return "list_length >= 0" if rows.queries == 1 else f"({row}) / query_rows < list_queries"
