"""The walk of a Hopper forward kernel over the key tiles of a work tile, from the last to the first."""

from __future__ import annotations

from attnc.expr.nodes import Compare, Or
from attnc.plan.ir import Forward
from attnc.plan.sm90 import roles_of
from attnc.plan.sm90.roles import ALL_SEE
from attnc.target.sm80.loop import TileLoop
from attnc.target.sm80.printer import scalar


class KeyWalk:
    """Of one kernel. search_lanes: lanes of the scheduler that search together for the bounds of a tile, or
    of each consumer, "" where none do; lo_of_all: the first tile of all consumers.
    """

    def __init__(self, kernel: Forward, loop: TileLoop) -> None:
        roles = roles_of(kernel)
        self._regions, self._loop, self._all_see = kernel.regions, loop, roles.work.all_see
        lanes = "(32 / (BLOCK_M / 64))" if roles.own_ranges else "32"
        self.search_lanes = lanes if roles.searches_together else ""
        self.lo_of_all = "work.first_tile" if loop.lo in roles.work.own else loop.lo

    @property
    def all_rows_see(self) -> str:
        """Whether all rows see a key of the tile at hand or of those before it."""
        match self._regions.loops:
            case (loop,) if isinstance(loop.masked, Or):
                ends = [side.right for side in loop.masked.operands if isinstance(side, Compare)]
                if len(ends) == 2:
                    first, last = map(scalar, ends)
                    return f"max(kv_lo, {first}) < min(kv_lo + BLOCK_N, {last})"
        return "!is_partial(kv_lo)" if self._all_see is None else f"kv_lo < {ALL_SEE}"

    @property
    def last_tile(self) -> str:
        lo, last = self._loop.lo, "(hi - 1) / BLOCK_N * BLOCK_N"
        return f"hi > {lo} ? {f'previous({last} + BLOCK_N)' if self._loop.skips else last} : {lo} - BLOCK_N"
