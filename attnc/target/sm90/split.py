"""The split of the keys that a block of a Hopper decode kernel has: every so many-th tile, or so many
keys.
"""

from __future__ import annotations

from attnc.expr.construct import ZERO
from attnc.plan.ir import Decode, Module
from attnc.target.sm80.printer import scalar
from attnc.target.sm80.split import Split


class Sm90Split(Split):
    """As for `cuda.sm_80`. starts_early: whether its first tile is known before any length is."""

    def __init__(
        self, module: Module, kernel: Decode, *, columns: int, stored: str, starts_early: bool
    ) -> None:
        super().__init__(module, kernel, columns=columns, stored=stored)
        assert self.planned.in_turn
        self._starts_early = starts_early

    @property
    def start(self) -> list[str]:
        """The step from one tile to the next, and the first tile if that is known."""
        if not self.has_fixed_size:
            comment, step = "every so many-th tile", "const int split_step = args.SPLITS * BLOCK_N;"
        else:
            comment = "so many keys, or every so many-th tile"
            step = "const int split_size = args.SPLIT_SIZE, "
            step += "split_step = split_size > 0 ? BLOCK_N : args.SPLITS * BLOCK_N;"
        return [f"// this block's split: {comment}", step, *([self._first] if self._starts_early else [])]

    @property
    def _first(self) -> str:
        lo = "" if self.planned.lo == ZERO else f"{scalar(self.planned.lo)} + "
        tile = "(split_size > 0 ? split_size : BLOCK_N)" if self.has_fixed_size else "BLOCK_N"
        return f"const int split_lo = {lo}split * {tile};"

    @property
    def bounds(self) -> list[str]:
        end = hi = scalar(self.planned.hi)
        if self.has_fixed_size:
            end = f"split_size > 0 ? min(split_lo + split_size, {hi}) : {hi}"
        return [*([] if self._starts_early else [self._first]), f"const int split_hi = {end};"]
