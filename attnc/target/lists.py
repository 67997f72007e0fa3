"""What all languages print alike of the kernels that make lists ready for a walk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from attnc.expr.construct import ZERO
from attnc.expr.nodes import Expr
from attnc.plan.ir.list_making import ListMaking
from attnc.plan.ir.module import ListedRows
from attnc.plan.lists import BLOCKS
from attnc.target.declaration import show_product


class Lists(ABC):
    """Lists of blocks, or of keys. made: of what; stop: where the blocks end that a list can name."""

    made: ListMaking
    stop: ClassVar[str] = BLOCKS.name

    @abstractmethod
    def print_scalar(self, expr: Expr) -> str:
        """Prints a scalar in the language at hand."""

    @property
    def keeps(self) -> list[str]:
        return []

    def place(self, key: str) -> str:
        return key

    @property
    def sizes(self) -> list[str]:
        return [*self.made.dims, BLOCKS.name]

    @property
    def lines(self) -> str:
        return show_product(self.made.lines)


class RowLists(Lists):
    """Lists of rows of memory, of which every program finds its own; stop: where the keys end."""

    rows: ListedRows
    stop = "N"

    def place(self, key: str) -> str:
        """Returns the row in memory of a key, or the key itself where pages are still to be looked up."""
        return key if self.rows.first == ZERO else f"{self.print_scalar(self.rows.first)} + {key}"

    @property
    def sizes(self) -> list[str]:
        return list(dict.fromkeys((*super().sizes, *self.rows.dims)))

    @property
    def lines(self) -> str:
        return show_product(self.rows.lines)
