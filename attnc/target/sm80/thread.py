"""The rows of a q tile that a thread of a CUDA kernel has: their numbers, and what is loaded of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnc.expr.nodes import Expr, Index, Ref, walk
from attnc.model.dtypes import DType
from attnc.plan.ir import Decode, Fetch, Forward, Statement, statement_expressions
from attnc.target.sm80.printer import at_row, load, value_type


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRows:
    """Rows r of a thread.

    computed: statements in front of the step, and loads in it; split: what warps share, rows "q" or keys
    "kv"; row: the number of row r in its tile; tile: the first row of that. group: query heads that fill the
    rows of a tile together, "" for one, of which first_head comes first; heads: how many of these rows have
    one, "" for all. lane: what is true for the only thread that a row begins with, besides its lane;
    is_split: whether the first split of the keys begins it; in_sequence: the condition that its query is one
    of a sequence, "" where all are; query: that of all rows of a tile, "" where it may have several.
    """

    kernel: Forward | Decode
    dtypes: dict[str, DType]
    computed: tuple[Statement, ...]
    split: str
    row: str
    tile: str = "q_lo"
    group: str = ""
    heads: str = ""
    first_head: str = ""
    lane: str = ""
    is_split: bool = False
    in_sequence: str = ""
    query: str = ""

    @property
    def first(self) -> str:
        return "warp * WARP_M" if self.split == "q" else "0"

    @property
    def first_key(self) -> str:
        return "0" if self.split == "q" else "warp * WARP_N"

    @property
    def key_offset(self) -> str:
        return "" if self.split == "q" else "warp * WARP_N + "

    @property
    def writer(self) -> str:
        return "t == 0" if self.split == "q" else "warp == 0 && t == 0"

    @property
    def first_lane(self) -> str:
        """The one thread of a row that starts its sum with the sink's 1."""
        alone = "true" if self.kernel.softmax.rescale == "every_step" else self.writer
        return f"{self.lane}{alone}{''.join(f' && {condition}' for condition in self._begins)}"

    @property
    def _begins(self) -> list[str]:
        found = ["split == 0"] if self.is_split else []
        return found + ([self.in_sequence] if self.in_sequence else [])

    @property
    def first_m(self) -> str:
        assert self.kernel.softmax.sink is not None
        sink = at_row(self.kernel.softmax.sink)
        return f"{' && '.join(self._begins)} ? {sink} : -INF" if self._begins else sink

    @property
    def q_idx(self) -> str:
        if self.query:
            return self.query
        row = f"{self.tile} + {self.row}"
        return f"({row}) / {self.group}" if self.group else row

    @property
    def head(self) -> str:
        if not self.group:
            return "h"
        head = f"{self.tile} + {self.row}" if self.query else f"({self.tile} + {self.row}) % {self.group}"
        return self.first_head + (f"min({head}, {self.heads} - 1)" if self.heads else head)

    @property
    def have_heads(self) -> bool:
        sink, dropout = self.kernel.softmax.sink, self.kernel.softmax.dropout
        found = (*self.expressions(), *(() if sink is None else (sink,)))
        found += () if dropout is None else (dropout.head,)
        return bool(self.group) and any(
            isinstance(node, Ref) and node.name == "h" for expr in found for node in walk(expr)
        )

    @property
    def uses_q_pos(self) -> bool:
        return self._reads("q_pos")

    @property
    def needs_q_idx(self) -> bool:
        return self.uses_q_pos or self.kernel.softmax.dropout is not None or self._reads("q_idx")

    @property
    def values(self) -> str:
        names = ["q_idx[ROWS]"] if self.needs_q_idx else []
        names += ["h[ROWS]"] if self.have_heads else []
        return ", ".join([*names, *(["q_pos[ROWS]"] if self.uses_q_pos else [])])

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        step = self.kernel.step
        loads = (*self.kernel.outer, *step.fetches, *step.masked_fetches)
        return tuple(fetch for fetch in loads if fetch.axes == ("q",))

    @property
    def declared(self) -> list[str]:
        """Declarations of what a thread knows of its rows."""
        values = [f"int {self.values};"] if self.values else []
        return [*values, *map(self.array, self.fetches)]

    @property
    def found(self) -> list[str]:
        """Statements that find it of row r."""
        places = [f"q_idx[r] = {self.q_idx};"] if self.needs_q_idx else []
        places += [f"h[r] = {self.head};"] if self.have_heads else []
        return [*places, *self.found_of_query]

    @property
    def found_of_query(self) -> list[str]:
        """The same where q_idx is there."""
        places = ["q_pos[r] = q_idx[r] + N - M;"] if self.uses_q_pos else []
        return [*places, *map(self.value, self.fetches)]

    def array(self, fetch: Fetch) -> str:
        return f"{value_type(fetch, self.dtypes[fetch.load.tensor])} {fetch.name}[ROWS];"

    def value(self, fetch: Fetch) -> str:
        return f"{fetch.name}[r] = {load(fetch, self.dtypes[fetch.load.tensor])};"

    def expressions(self) -> Iterator[Expr]:
        for item in self.computed:
            yield from statement_expressions(item)
        step = self.kernel.step
        exprs = (step.score, step.keep, step.kept, step.v_scale, self.kernel.softmax.v_scale)
        yield from (expr for expr in exprs if expr is not None)

    def _reads(self, index: str) -> bool:
        return any(Index(index) in walk(expr) for expr in self.expressions())
