"""What a Hopper forward kernel does with o in the end: rows that an epilogue loads, two columns at a time."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.expr.nodes import COLUMN, Const, Expr, Index, children
from attnc.model.dtypes import DType
from attnc.plan.ir import Decode, Fetch, Forward, Module, Statement
from attnc.plan.sm90 import roles_of
from attnc.plan.sm90.finishing import Finishing, Staged, pair_rows
from attnc.target.sm80.finish import Finish
from attnc.target.sm80.printer import address, local, scalar, stored_type


@dataclass(frozen=True, slots=True)
class PairedRow:
    """A row that is loaded by pairs of columns. first, at: its column 0, and d; stride: from one to the next;
    exists: whether it does; condition: that it does, "" where it always does; kind: type of an element.
    """

    name: str
    kind: str
    first: str
    at: str
    stride: str
    exists: str
    condition: str


class Sm90Finish(Finish):
    """As for `cuda.sm_80`. paired: rows that are loaded two columns at a time; staged: the one that is copied
    ahead, as `row`, and `plan`: what is computed of it ahead; None for none.
    """

    paired: tuple[PairedRow, ...]
    staged: Staged | None

    def __init__(self, module: Module, kernel: Forward | Decode, dtypes: dict[str, DType], kept: str) -> None:
        super().__init__(module, kernel, dtypes)
        self.kept_columns, self._variant = kept, module.variant
        if isinstance(kernel, Decode):
            planned = pair_rows(kernel, dtypes)
        else:
            planned = roles_of(kernel).finishing or Finishing()
        self._pairs = {fetch.name for fetch in planned.paired}
        self.paired, self.staged = tuple(map(self._pair, planned.paired)), planned.staged
        self.staged_row = None if self.staged is None else self._pair(self.staged.fetch)

    @property
    def value(self) -> str:
        return super().value if self.staged is None else scalar(self.staged.value)

    @property
    def ahead(self) -> str:
        assert self.staged is not None
        expr = self.staged.ahead
        return scalar(children(expr)[0] if self.staged.in_pairs else expr)

    @property
    def box_beside(self) -> str:
        """Where the box of a row that TMA copies lies, behind its columns and rows."""
        assert self.staged is not None
        places = [*map(scalar, self.staged.beside), "0", "0"]
        return ", ".join(places[:2])

    def half(self, fetch: Fetch, words: str) -> str:
        return f"to_float({self._kind(fetch.load.tensor)}{{(unsigned short)({words} >> 16 * c)}})"

    def statement(self, item: Statement) -> str:
        if isinstance(item, Fetch) and item.name in self._pairs:
            return local("const float", {item.name: self.half(item, f"{item.name}_pairs[r][j]")})
        return super().statement(item)

    def _pair(self, fetch: Fetch) -> PairedRow:
        tensor, row, indices = fetch.load.tensor, fetch.row, fetch.load.indices
        base, done = (f"args.{tensor}_ptr", 0) if row is None else (row.name, len(row.indices))
        columns: tuple[Expr, Expr] = Const(0), Index(COLUMN)
        first, at = (address(base, tensor, (*indices[:-1], x), scalar, done=done) for x in columns)
        stride, exists = f"args.stride_{tensor}_{len(indices) - 1}", scalar(fetch.guard)
        condition = "" if exists == "true" else f"if ({exists}) "
        return PairedRow(fetch.name, self._kind(tensor), first, at, stride, exists, condition)

    def _kind(self, tensor: str) -> str:
        return stored_type(self._dtypes[tensor], self._variant)
