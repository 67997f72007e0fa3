"""What a step of a kernel of gradients tests, what it multiplies by, and how its warps share a tile."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.expr.nodes import And, Const, Expr, Or, walk
from attnc.plan.ir.backward import BackwardKernel
from attnc.target.printer import IN_ROWS, Printer
from attnc.target.sm80.printer import CudaSums, local, scalar


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
    def in_place(self) -> bool:
        """Whether it is done where p is made."""
        return self.mode in ("always", "each")

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
    scores, and sums some columns of a gradient; sliced: blocks share those; over_q: rows are queries.
    """

    exchange: bool
    turns_columns: bool
    spreads: bool = False
    sliced: bool = False
    over_q: bool = False

    @property
    def kind(self) -> str:
        """The template of what warps do, behind `cuda/_share_` and before the axis of their rows."""
        return "columns" if self.spreads else "exchange" if self.exchange else "alone"

    @property
    def sizes_from(self) -> str:
        """The template of the sizes that follow."""
        axis = "q" if self.over_q else "kv"
        return f"cuda/_sizes_{'slices' if self.sliced else self.kind}_{axis}.cu.jinja"

    def first_of(self, gradient: str) -> str:
        """Returns the first column that a warp sums of dk or dv, by the name of their width, or of dq."""
        if self.spreads:
            return "own_column"
        if not (self.sliced or self.exchange):
            return "0"
        columns = "D_SLICE" if self.over_q else f"{gradient}_COLUMNS"
        return f"{'slice' if self.sliced else 'part'} * {columns}"

    def is_whole(self, gradient: str) -> str:
        """Returns whether those shares make up the width."""
        return f"WHOLE_{gradient}" if self.loads_left or self.sliced else "true"

    def columns_of_dq(self, width: str) -> str:
        return "D_SLICE" if self.sliced else "D_COLUMNS" if self.spreads else width

    @property
    def pair_of_columns(self) -> list[str]:
        """Declarations for two columns of scores that are queries."""
        at = f"{self.first_column}8 * j + 2 * t"
        return [] if self.over_q else [local("const int", at_tile=at)]

    def column(self, at: str) -> list[str]:
        """Declares the numbers of a column of scores. at: of one that is a query, in its tile."""
        if self.over_q:
            return [local("const int", kv_idx=f"kv_lo + {self.first_column}8 * j + 2 * t + c")]
        return [
            local("const int", q_idx=f"q_lo + {at}"),
            local("const int", q_pos="q_idx + N - M"),
        ]

    @property
    def first_column(self) -> str:
        if self.spreads:
            return "first_key + " if self.over_q else "first_query + "
        return "first_query + " if self.exchange else ""

    @property
    def loads_left(self) -> bool:
        return self.exchange or self.spreads


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyGradient:
    """A gradient over keys. size: its columns; head: the offset of its rows; tile, width: that it leaves
    through, and columns of that; factor: of the sums; is_rounded: whether it leaves in the element type.
    """

    name: str
    size: str
    head: str
    tile: str
    width: str
    factor: str
    is_rounded: bool
    warps: WarpShare

    @property
    def row(self) -> str:
        """The first row that a warp sums."""
        return "own_row" if self.warps.spreads else "first_key"

    @property
    def column(self) -> str:
        return self.warps.first_of(self.size)

    @property
    def whole(self) -> str:
        return self.warps.is_whole(self.size)

    @property
    def store(self) -> str:
        """What stores the tile, or a slice of it that begins `behind` the other arguments."""
        share, width = ("slice", f"{self.size}_COLUMNS, ") if self.warps.sliced else ("matrix", "")
        return f"store_{share}<{self.width}, {self.size}, {width}BLOCK_N>"

    @property
    def behind(self) -> str:
        return f", {self.column}" if self.warps.sliced else ""
