"""Text of the gradients of stick-breaking, whose tiles of keys need what those behind and before them sum to
(`target.sticks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnc.plan.ir import Loop, Module
from attnc.plan.ir.backward import BackwardKernel
from attnc.target.sticks import BEFORE, BEHIND, hands_on
from attnc.target.triton.printer import scalar


@dataclass(frozen=True, slots=True)
class SticksText:
    """What one kernel of such a backward has besides those of others. needs_dp: it makes more than dv;
    packs_queries: rows of sequences follow each other.
    """

    module: Module
    kernel: BackwardKernel
    needs_dp: bool
    packs_queries: bool

    @property
    def _over_q(self) -> bool:
        return self.kernel.over_q

    @property
    def hands_on(self) -> bool:
        return hands_on(self.module)

    @property
    def has_dlse(self) -> bool:
        return self.module.variant.attention.lse is not None

    @property
    def edges(self) -> list[str]:
        uses_before = self.hands_on if self._over_q else self.needs_dp
        return [BEHIND, *([BEFORE] if uses_before else [])]

    @property
    def rows(self) -> str:
        return "M" if self.packs_queries else "M_padded"

    @property
    def starts(self) -> Iterator[str]:
        for name in self.edges:
            at = f"{name}_ptr + first_row * EDGES"
            if self._over_q:
                yield f"{name}_rows = {at} + q_idx"
            else:
                yield f"{name}_tile = {at} + tl.cast(kv_lo // BLOCK_N, tl.int64) * {self.rows}"

    @property
    def carried(self) -> list[str]:
        return [BEFORE] if self._over_q else []

    @property
    def exchange(self) -> list[str]:
        """Lines that load what is behind a tile and hand on what is before, where a kernel owns queries."""
        behind = f"behind = tl.load({self.at(BEHIND)}, mask=q_idx < M, other=0.0)"
        before = f"tl.store({self.at(BEFORE)}, before, mask=q_idx < M)"
        return [behind, *([before] if self.hands_on else [])]

    @property
    def loads(self) -> list[str]:
        """Lines that load the edges of a tile."""
        return [f"{name} = tl.load({self.at(name)}, mask=q_idx < M, other=0.0)" for name in self.edges]

    @property
    def step_names(self) -> list[str]:
        if not self._over_q:
            return [f"{name}_tile" for name in self.edges]
        return [*(f"{name}_rows" for name in self.edges), "q_idx", "M", *self._padded]

    @property
    def _padded(self) -> list[str]:
        return [] if self.packs_queries else ["M_padded"]

    def at(self, name: str) -> str:
        if not self._over_q:
            return f"{name}_tile + q_idx"
        return f"{name}_rows + tl.cast(kv_lo // BLOCK_N, tl.int64) * {self.rows}"

    def left_names(self, parts: list[str], fixed: list[str]) -> list[str]:
        """Returns what the step that walks backwards takes. parts: of q; fixed: what tiles of k are loaded
        with.
        """
        names = ["rest", f"{BEHIND}_rows", *parts, "K", *fixed, "kv_lo", "N", "stride_kn", "q_idx", "M"]
        return [*dict.fromkeys((*names, *self._padded, *self.kernel.step.names))]

    @property
    def backwards(self) -> Iterator[tuple[Loop, str, str, str]]:
        """Yields the loops from the last to the first: each with how many tiles it has, what counts them, and
        where the tile at hand lies.
        """
        for loop in reversed(self.kernel.regions.loops):
            if loop.listed is not None:
                block = loop.listed.block
                yield loop, f"listed * ({block} // BLOCK_N)", "list_item", "tiles - 1 - done"
                continue
            start, stop = scalar(loop.start), scalar(loop.stop)
            count = f"tl.cdiv(tl.maximum({stop} - {_enclose(start)}, 0), BLOCK_N)"
            if start == "0":
                count = f"tl.cdiv(tl.maximum({stop}, 0), BLOCK_N)"
            first = "" if start == "0" else f"{start} + "
            yield loop, count, "kv_lo", f"{first}(tiles - 1 - done) * BLOCK_N"


def _enclose(text: str) -> str:
    return text if text.isidentifier() else f"({text})"
