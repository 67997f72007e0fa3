"""Where rows of q, k, v, o and lse lie in global memory, and which of them exist."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from attnc.model.dtypes import DType
from attnc.model.tensors import Role
from attnc.plan.ir import Decode, Forward
from attnc.plan.signature import stride_name
from attnc.target.kernel_view import OutputView
from attnc.target.sm80.pack import HeadPack
from attnc.target.sm80.printer import STORED, offset, scalar
from attnc.target.terms import plus

#: Matrices whose rows are copied or stored in tiles, and what their places are called in a kernel.
PLACES = {"q": "queries", "k": "keys", "v": "values", "o": "outputs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalRows:
    """Rows of one kernel. page: keys of a page, 0 without pages; by_entry: keys are those that a list names,
    of which each is a page; listed_pages: rows of a page where lists number rows in pages, "" where all lie
    one behind the other; v_in_k: v is columns of k.
    """

    kernel: Forward | Decode
    view: OutputView
    dtypes: dict[str, DType]
    pack: HeadPack
    page: int
    v_in_k: bool
    by_entry: bool = False
    listed_pages: str = ""

    @property
    def page_entry(self) -> str:
        if self.by_entry:
            return "list_row[kv_idx]"
        rows = self.view.rows("k")
        return f"(int){rows.table}[(long long)(kv_idx / PAGE) * args.{rows.table_stride}]"

    def page_strides(self, tensor: str) -> str:
        """Returns the distances of pages of a tensor, and of rows; of single rows, where those are listed."""
        rows = f"args.stride_{tensor}n"
        if not self.by_entry:
            return f"args.stride_{tensor}p, {rows}"
        if not self.listed_pages:
            return f"{rows}, 0"
        held = self.view.row_zero(tensor).tensor
        axis = held.axis(Role.BATCH)
        assert axis is not None, "sequences or pages"
        return f"args.{stride_name(held, axis)}, {rows}"

    def pool_strides(self, tensor: str) -> str:
        """Returns the same, and how many rows a page has where a list numbers those of all pages."""
        strides = self.page_strides(tensor)
        return f"{strides}, {self.listed_pages}" if self.listed_pages else strides

    def listed_row(self, number: str) -> str:
        """Returns how far a row of memory lies behind the first one of a pool, by its number in pages."""
        page, row = f"{number} / {self.listed_pages}", f"{number} % {self.listed_pages}"
        return f"{page} * pool.page_stride + {row} * pool.stride"

    @property
    def run(self) -> int:
        """Rows of a tile that surely lie in one page: tiles and shares start at multiples of 16."""
        return math.gcd(self.page, 16)

    @property
    def table_type(self) -> str:
        name = self.view.rows("k").table_stride.removeprefix("stride_").rsplit("_", 1)[0]
        return STORED[self.dtypes[name]]

    def offset(self, name: str) -> str:
        """Returns the offset from the first element to row 0 of the sequence and head at hand; in pages, to
        the head.
        """
        return offset(self.view.row_zero(name))

    @property
    def places(self) -> Iterator[str]:
        yield from (self.place(name) for name in "qkv" if name != "v" or not self.v_in_k)

    def place(self, name: str) -> str:
        if self.pack.group and name in ("q", "o"):
            return self._place_of_heads(name)
        rows = self.view.rows(name)
        of, letter = rows.tensor, "n" if name in ("k", "v") else "m"
        first = plus(f"args.{of}_ptr", self.offset(name))
        if rows.page:
            strides = f"args.stride_{of}p, args.stride_{of}n"
            table = f"{rows.table}, args.{rows.table_stride}"
            return f"const Pages<{self.table_type}> {PLACES[name]} = {{{first}, {strides}, {table}}};"
        element = "element" if name == "o" else "const element"
        return f"const Rows<{element}> {PLACES[name]} = {{{first}, args.stride_{of}{letter}}};"

    def _place_of_heads(self, name: str) -> str:
        first = f"args.{name}_ptr + b * args.stride_{name}b"
        if head := self.pack.head:
            first += f" + {head} * {self.pack.alone or self.pack.group} * args.stride_{name}h"
        if self.pack.query:
            kind = "Rows<element>" if name == "o" else "Rows<const element>"
            first += f" + {self.pack.query} * args.stride_{name}m"
            return f"const {kind} {PLACES[name]} = {{{first}, args.stride_{name}h}};"
        kind = "Heads<element>" if name == "o" else "Heads<const element>"
        strides = f"args.stride_{name}m, args.stride_{name}h"
        return f"const {kind} {PLACES[name]} = {{{first}, {strides}, {self.pack.group}}};"

    def sequence(self, name: str) -> str:
        """Returns how far the sequence at hand lies in q, o or lse, as a summand."""
        is_one = self.view.row_zero(name).tensor.axis(Role.BATCH) is None
        return "" if is_one else f" + b * args.stride_{name}b"

    def _in_tensor(self, query: str) -> str:
        first = self.view.rows("q").first
        return f"({query})" if first is None else f"({first} + {query})"

    @property
    def lse_at(self) -> str:
        return self._lse_of("q" if self.view.rows("q").first is None else self._in_tensor("q"))

    @property
    def joined_lse_at(self) -> str:
        """The same where splits are joined: q counts the rows of all packed sequences."""
        return self._lse_of("q")

    def _lse_of(self, query: str) -> str:
        terms = f"head * args.stride_lseh + {query} * args.stride_lsem"
        return f"{self.sequence('lse').removeprefix(' + ')} + {terms}".removeprefix(" + ")

    def row_at(self, name: str) -> str:
        """Returns where row `row` of q or o begins, where a tile may have rows of several heads."""
        first = f"args.{name}_ptr{self.sequence(name)}"
        query, head = self.pack.query_of("row"), self.pack.head_of("row")
        return f"{first} + {self._in_tensor(query)} * args.stride_{name}m + ({head}) * args.stride_{name}h"

    # -- rows that do not exist ----------------------------------------------------------------------------

    @property
    def stored(self) -> str:
        return scalar(self.kernel.stored)

    @property
    def all_stored(self) -> str:
        return self.pack.all_rows(self.stored)

    def if_exists(self, value: str, otherwise: str) -> str:
        query = "q" if isinstance(self.kernel, Decode) else "row"
        return f"{query} < M ? {value} : {otherwise}" if self.view.clears else value
