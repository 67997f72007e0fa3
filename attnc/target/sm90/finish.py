"""What a Hopper forward kernel does with o in the end: rows that an epilogue loads, two columns at a time."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.expr.nodes import COLUMN, TRUE, Const, Expr, Index
from attnc.model.dtypes import DType
from attnc.plan.ir import Fetch, Forward, Module, Statement
from attnc.plan.sm90 import roles_of
from attnc.target.sm80.finish import Finish
from attnc.target.sm80.printer import address, local, scalar, stored_type


@dataclass(frozen=True, slots=True)
class PairedRow:
    """A row that is loaded by pairs of columns. first, at: its column 0, and d; stride: from one to the next;
    exists: whether it does.
    """

    name: str
    first: str
    at: str
    stride: str
    exists: str

    @property
    def condition(self) -> str:
        return "" if self.exists == "true" else f"if ({self.exists}) "


class Sm90Finish(Finish):
    """As for `cuda.sm_80`, where `paired` are those rows that the plan loads so."""

    paired: tuple[PairedRow, ...]

    def __init__(
        self, module: Module, kernel: Forward, dtypes: dict[str, DType], *, kept_columns: str
    ) -> None:
        super().__init__(module, kernel, dtypes)
        self.kept_columns = kept_columns
        self._variant, self._fetches = module.variant, roles_of(kernel).paired
        self.paired = tuple(map(_pair, self._fetches))

    def statement(self, item: Statement) -> str:
        if not isinstance(item, Fetch) or item not in self._fetches:
            return super().statement(item)
        kind = stored_type(self._dtypes[item.load.tensor], self._variant)
        pair = f"(unsigned short)({item.name}_pairs[r][j] >> 16 * c)"
        return local("const float", {item.name: f"to_float({kind}{{{pair}}})"})


def _pair(fetch: Fetch) -> PairedRow:
    tensor, row, indices = fetch.load.tensor, fetch.row, fetch.load.indices
    base, done = (f"args.{tensor}_ptr", 0) if row is None else (row.name, len(row.indices))

    def at(column: Expr) -> str:
        return address(base, tensor, (*indices[:-1], column), scalar, done=done)

    return PairedRow(
        name=fetch.name,
        first=at(Const(0)),
        at=at(Index(COLUMN)),
        stride=f"args.stride_{tensor}_{len(indices) - 1}",
        exists="true" if fetch.guard == TRUE else scalar(fetch.guard),
    )
