"""How o of a Hopper forward kernel is stored: through shared memory by TMA, or from registers."""

from __future__ import annotations

from attnc.plan.ir import Forward
from attnc.plan.sm90.layout import Sm90Layout


class Stores:
    """How each config stores o (`Sm90Layout.way_out`).

    through_q, through_v: some config through its rows of Q, or the tiles of V; through_a_tile: some through a
    tile of its own, or of Q; by_tma, by_thread: some by TMA, some from registers; goes_by_tma: whether the
    config at hand does, as C++.
    """

    def __init__(self, kernel: Forward, layout: Sm90Layout, stored: str) -> None:
        ways = [layout.way_out(config) for config in kernel.configs]
        self.through_q, self.through_v = "q" in ways, "v" in ways
        self.through_a_tile = self.through_q or "tile" in ways
        self.by_tma, self.by_thread = any(ways), not all(ways)
        names = ["O_TILES", *(f"O_THROUGH_{way.upper()}" for way in ("q", "v") if way in ways)]
        self.goes_by_tma = f"({' || '.join(names)})" if len(names) > 1 else names[0]
        self._is_packed = kernel.grid.sequences is not None
        self._may_fail = kernel.softmax.headroom > 0
        self._stored = stored

    @property
    def is_whole_box(self) -> str:
        inside = [f"q_lo + 64 * consumer + 16 * warp + 16 <= {self._stored}"] if self._is_packed else []
        return " && ".join([*inside, *(["written == ~0u"] if self._may_fail else [])])

    @property
    def is_no_box(self) -> str:
        reaches = ["would reach into the rows of the next sequence"] if self._is_packed else []
        return ", or ".join([*reaches, *(["has rows that are not written"] if self._may_fail else [])])
