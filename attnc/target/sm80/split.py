"""The split of the keys that a block of a decode kernel has, and the kernel that joins what comes of them."""

from __future__ import annotations

from attnc.expr.construct import ZERO
from attnc.plan.decode import has_fixed_splits
from attnc.plan.ir import Decode, Module
from attnc.target.sm80.loop import TileLoop
from attnc.target.sm80.printer import local, scalar


class Split:
    """Of a kernel whose keys are split. columns: of o of a split; joined_by: the name of the kernel that
    joins splits; all_rows: how many rows of all heads there are; joins_more: a sink or a scale of v of each
    row beside its segments; has_fixed_size: whether some config fixes how many keys a split has; in_turn:
    splits take tiles in turn; row_of_all: the number of a row among those of all heads; row: where its
    results begin, among those of all splits; stored: rows of a head that are; rows: the argument that counts
    those of a head, of one sequence or of all packed ones; lengths: statements that give an epilogue sizes,
    and those of the sequence.
    """

    def __init__(
        self,
        module: Module,
        kernel: Decode,
        lengths: list[str],
        loop: TileLoop,
        *,
        columns: int,
        stored: str,
    ) -> None:
        assert kernel.split is not None
        self.lengths = [] if kernel.epilogue is None else lengths
        self.kernel = kernel
        self.planned, self.columns, self._loop = kernel.split, columns, loop
        self.joined_by = f"{module.variant.attention.name}_combine"
        own = kernel.softmax.sink is not None or kernel.softmax.v_scale is not None
        self.joins_more = kernel.split.segment > 0 and own
        self.has_fixed_size = has_fixed_splits(kernel)
        self.in_turn = kernel.split.in_turn and not kernel.split.segment
        packed = kernel.grid.sequences
        self.rows = "args.M" if packed is None else f"args.{scalar(packed.rows)}"
        self.row_of_all = f"((long long)(b * H + head) * {stored} + q)"
        if packed is not None:
            self.row_of_all = f"((long long)head * {scalar(packed.rows)} + q_first + q)"
        self.row = f"{self.row_of_all} * args.SPLITS + split"
        self.all_rows = f"(long long){'args.B * ' if packed is None else ''}args.H * {self.rows}"

    def place_of_row(self, number: str) -> str:
        """Returns the row, the head and the sequence of a number among all rows of all heads: q counts the
        rows of all packed sequences.
        """
        place = {"q": f"{number} % {self.rows}", "head": f"{number} / {self.rows} % args.H"}
        place |= {"b": f"{number} / {self.rows} / args.H"} if self.kernel.grid.sequences is None else {}
        return local("const int", place)

    @property
    def size_names(self) -> list[str]:
        return ["SPLITS", *(["SPLIT_SIZE"] if self.has_fixed_size else [])]

    @property
    def bounds(self) -> list[str]:
        lo, hi = scalar(self.planned.lo), scalar(self.planned.hi)
        if self.planned.by_block:
            line = f"args.{self._loop.bits}_ptr, list_line, {self._loop.listed}"
            return [
                "// this block's split: as many of the listed blocks as the others have",
                f"const Keys own = keys_of_split({line}, {lo}, {hi}, split, args.SPLITS);",
                "const int split_lo = own.lo, split_hi = own.hi;",
            ]
        starts_at_0 = self.planned.lo == ZERO
        visited = f"max({hi if starts_at_0 else f'{hi} - {lo}'}, 0)"
        tiles = f"({visited} + BLOCK_N - 1) / BLOCK_N"
        fixed = "args.SPLIT_SIZE > 0 ? args.SPLIT_SIZE : " if self.has_fixed_size else ""
        first = "split * split_size" if starts_at_0 else f"{lo} + split * split_size"
        return [
            "// this block's split: whole tiles, as many as the others have, or what is left of them",
            f"const int split_size = {fixed}({tiles} + args.SPLITS - 1) / args.SPLITS * BLOCK_N;",
            f"const int split_lo = {first}, split_hi = min(split_lo + split_size, {hi});",
        ]
