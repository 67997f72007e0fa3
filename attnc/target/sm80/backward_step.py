"""What a step of a kernel of gradients tests, what it multiplies by, and how its warps share a tile."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.expr.nodes import And, Const, Expr, Or, walk
from attnc.plan.ir.backward import BackwardKernel
from attnc.target.printer import IN_ROWS, Printer
from attnc.target.sm80.printer import CudaSums, scalar


class MaskTest:
    """The test of the mask. mode: where it is done: "never", "always", in partial tiles "after" everything
    else, or, where sums need it earlier, for "each" element; bit: whether dropout keeps the element at hand;
    in_rows: whether that is of a query; clears_ds: whether ds of keys that no query keeps is made 0.
    """

    def __init__(self, kernel: BackwardKernel, show: Printer, partial: str) -> None:
        self._keep, self._show = kernel.step.keep, show
        known = {"true": "always", "false": "never"}.get(partial)
        tested = known or ("each" if kernel.chain.adjoints or kernel.softmax.breaks_sticks else "after")
        self.mode = "never" if self._keep is None else tested
        by_query = "kept[r] >> (2 * j + c) & 1"
        self.bit = by_query if kernel.over_q else "kept[r / 2][j / 8] >> (4 * j % 32 + 2 * c + r % 2) & 1"
        self.in_rows = show(IN_ROWS)
        self.clears_ds = not kernel.over_q and kernel.step.kept is not None and not kernel.fills_keys

    @property
    def condition(self) -> str:
        assert self._keep is not None
        return self._show(self._keep)

    @property
    def operand(self) -> str:
        assert self._keep is not None
        joins = any(isinstance(node, And | Or) for node in walk(self._keep))
        return f"({self.condition})" if joins else self.condition


class Factors:
    """What scores, ds and sums are multiplied by. score: the name of the score; times_scale, times_factor: of
    scores, and of sums at the end besides a constant, "" for 1; of_ds: that of the score, where sums take it
    at once, "" for 1.
    """

    def __init__(self, kernel: BackwardKernel, sums: CudaSums, *, at_once: bool = False) -> None:
        self._chain, self._sums = kernel.chain, sums
        slope, factor = kernel.chain.slope, kernel.chain.factor
        self.score = "s" if kernel.step.score is None else "score"
        self.times_scale = "" if kernel.softmax.scale is None else " * SCALE"
        self.times_factor = "" if factor is None else f" * ({scalar(factor)})"
        self.of_ds = scalar(slope) if at_once and slope is not None else ""

    @property
    def slope(self) -> str:
        slope: Expr | None = self._chain.slope
        assert slope is not None
        return self._sums.factor(slope)

    def of(self, name: str) -> str:
        scale = 1.0 if name == "dv" else self._chain.scale
        if scale == 1.0 and self.times_factor:
            return self.times_factor.removeprefix(" * ")
        return scalar(Const(scale)) + self.times_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpShare:
    """How warps share a tile. exchange: each has keys, and gives what it makes of them to the others;
    turns_columns: tiles are read along their columns, too; spreads: each makes some rows and columns of
    scores, and sums some columns of a gradient; over_q: rows are queries, not keys.
    """

    exchange: bool
    turns_columns: bool
    spreads: bool = False
    over_q: bool = False

    @property
    def first_query(self) -> str:
        return "first_query" if self.exchange else "0"

    @property
    def first_column(self) -> str:
        if self.spreads:
            return "first_key + " if self.over_q else "first_query + "
        return "first_query + " if self.exchange else ""

    @property
    def loads_left(self) -> bool:
        return self.exchange or self.spreads
