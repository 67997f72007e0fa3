"""How the rows of a q tile stand for queries and heads: query heads that share keys fill a tile together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from attnc.plan.access import Sequences
from attnc.plan.ir import Decode, Forward
from attnc.target.sm80.printer import local, scalar
from attnc.target.terms import factor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPack:
    """The rows of a tile. group: query heads of a KV head, "" where rows are of one head; alone: the same
    where a tile has rows of one query, so that some rows have no head; padded: as many as a query has where
    a tile has several such, 0 elsewhere; head, heads: the index of the KV head, and their number. sequences:
    how packed queries are numbered; last_first: the last rows of each come first. query: the one whose rows
    a tile has, "" where it may have several.
    """

    query: ClassVar[str] = ""

    group: str
    alone: str
    head: str
    heads: str
    h_kv: str
    padded: int = 0
    sequences: Sequences | None = None
    last_first: bool = False

    @property
    def rows(self) -> str:
        return "query_rows" if self.alone else self.group

    @property
    def first_head(self) -> str:
        return f"{self.head} * {self.alone or self.group} + " if self.group and self.head else ""

    @property
    def rows_of_query(self) -> str:
        kind, rows = "const", f"({self.alone} + BLOCK_M - 1) / BLOCK_M * BLOCK_M"
        if self.padded:
            kind, rows = "constexpr", str(self.padded)
        return f"{kind} int query_rows = {rows};  // of a query: its heads, and rows that are none"

    def all_rows(self, queries: str) -> str:
        return f"{queries} * {self.rows}" if self.rows else queries

    def query_of(self, row: str) -> str:
        return f"{factor(row)} / {self.rows}" if self.rows else row

    def head_of(self, row: str) -> str:
        return f"{self.first_head}{factor(row)} % {self.rows}" if self.rows else "h"

    def if_head(self, row: str) -> str:
        """Returns a further condition for a row to have a head, "" where all have one."""
        return f" && {factor(row)} % {self.rows} < {self.alone}" if self.alone else ""

    @property
    def place(self) -> list[str]:
        """What the number of a tile means: batch entry, head and first query."""
        q_lo = local("const int", q_lo=self.query_of("row_lo"))
        if self.sequences is not None:
            return [*self._place_of_packed(self.sequences), *([q_lo] if self.rows else [])]
        if not self.head:
            return ["const int b = tile / row_tiles;", q_lo]
        place = {"b": f"tile / row_tiles / {self.heads}", self.head: f"tile / row_tiles % {self.heads}"}
        if self.rows:
            return [f"const int {', '.join(f'{name} = {value}' for name, value in place.items())};", q_lo]
        return [local("const int", place, q_lo="row_lo"), local("const int", h_kv=self.h_kv)]

    def _place_of_packed(self, sequences: Sequences) -> Iterator[str]:
        """Yields the way from `number` among the tiles of packed rows to b, the rows and the queries of its
        sequence.
        """
        cu, group = sequences.cu_seqlens, self.rows or "1"
        begins, all_rows = f"args.{cu}_ptr[{{}} * args.stride_{cu}_0]", scalar(sequences.rows)
        if self.head:
            yield local("const int", {self.head: "tile / row_tiles"})
        yield f"const int number = tile{' % row_tiles' if self.head else ''};"
        found = f"args.{cu}_ptr, args.stride_{cu}_0, number, B, {group}"
        yield f"const int sequence = find_sequence_of_rows({found});"
        yield f"const int q_first = {begins.format('sequence')};"
        yield f"const int q_end = sequence < B ? {begins.format('(sequence + 1)')} : {all_rows};"
        place = f"number - {self.all_rows('q_first')} / BLOCK_M - sequence"
        if self.last_first:
            place = f"{self.all_rows('q_end')} / BLOCK_M + sequence - number"
        yield f"const int q_rows = q_end - q_first, row_lo = ({place}) * BLOCK_M;"
        yield f"if (row_lo >= {self.all_rows('q_rows')})"
        yield "    return;  // a sequence that ends with a full tile has one more, without rows"
        yield "// what follows the last sequence has rows to write, but no queries"
        yield "int M = sequence < B ? q_rows : 0;"
        yield local("const int", b="min(sequence, B - 1)")
        if not self.rows:
            yield local("const int", q_lo="row_lo", h_kv=self.h_kv)

    @property
    def last_query(self) -> str:
        last = f"min(row_lo + BLOCK_M, {self.all_rows('M')}) - 1"
        return local("const int", q_hi=f"({last}) / {self.rows}" if self.rows else last)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryPack(HeadPack):
    """The same where a tile has heads of one query: its rows are counted from the first head of that."""

    query = "q_lo"

    @property
    def rows(self) -> str:
        return self.alone

    def all_rows(self, queries: str) -> str:
        return self.alone

    def query_of(self, row: str) -> str:
        return self.query

    def head_of(self, row: str) -> str:
        return f"{self.first_head}{row}"

    @property
    def place(self) -> list[str]:
        query = "tile / row_tiles"
        names = {"b": f"{query} / args.M", self.query: f"{query} % args.M"}
        if self.head:
            names |= {"b": f"{query} / args.M / {self.heads}", self.head: f"{query} / args.M % {self.heads}"}
        return [local("const int", names)]

    @property
    def last_query(self) -> str:
        return local("const int", q_hi=self.query)


def pack_of(kernel: Forward | Decode, alone_type: type[HeadPack] = HeadPack) -> HeadPack:
    """Returns how the rows of a kernel's tiles stand for queries and heads. alone_type: where a tile has rows
    of one query.
    """
    walk, alone, padded = kernel.walk, "", 0
    if isinstance(kernel, Decode) and kernel.pack is not None and kernel.pack.alone:
        alone, padded = scalar(kernel.pack.group), kernel.pack.padded
    group = "" if walk.group is None else scalar(walk.group)
    made = alone_type if alone else HeadPack
    return made(
        group=group,
        alone=alone,
        padded=padded,
        head=walk.head,
        heads=walk.heads,
        h_kv=scalar(kernel.kv_head),
        sequences=walk.sequences,
    )
