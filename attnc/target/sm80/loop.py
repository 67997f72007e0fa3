"""The loop over tiles of a CUDA kernel, forward or backward: its bounds, which tiles are partial, and which
of their keys any query keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnc.model.dtypes import DType
from attnc.plan.ir import Kernel, Statement
from attnc.plan.regions import guard_of, partial_test
from attnc.plan.steps import fetches_for, kept_fetches
from attnc.target.sm80.printer import scalar, statement


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLoop:
    """One `for` over the tiles of all regions. end: of the tiles that the block visits; step: from one to the
    next; fills: whether copied tiles hold zeros where no query keeps a key; ascends: whether the first tile
    comes first, where tiles are those of listed blocks; descends: whether a decode kernel begins with the
    last.
    """

    kernel: Kernel
    dtypes: dict[str, DType]
    end: str = "hi"
    step: str = "BLOCK_N"
    fills: bool = True
    ascends: bool = False
    descends: bool = False

    @property
    def lo(self) -> str:
        return scalar(self.kernel.regions.loops[0].start)

    @property
    def hi(self) -> str:
        return scalar(self.kernel.regions.loops[-1].stop)

    def descend(self) -> TileLoop:
        return replace(self, step="-BLOCK_N", descends=True)

    @property
    def first(self) -> str:
        start, step = self.lo, self.step
        if self.descends:
            start, step = f"({self.end} - 1) / BLOCK_N * BLOCK_N", "-BLOCK_N"
        found = f"next({start} {'+ BLOCK_N' if self.descends else f'- {step}'})" if self.guard else start
        return f"{self.end} > {self.lo} ? {found} : {self.lo} - BLOCK_N" if self.descends else found

    @property
    def more(self) -> str:
        return f"kv_lo >= {self.lo}" if self.descends else f"kv_lo < {self.end}"

    @property
    def limit(self) -> str:
        return self.lo if self.descends else self.end

    @property
    def visits(self) -> str:
        return "kv_lo >= end" if self.descends else "kv_lo < end"

    @property
    def tests(self) -> tuple[Statement, ...]:
        return self.kernel.regions.tests

    @property
    def masked(self) -> str:
        return scalar(partial_test(self.kernel.regions))

    @property
    def guard(self) -> str:
        guard = guard_of(self.kernel.regions)
        return "" if guard is None else scalar(guard)

    @property
    def listed(self) -> str:
        walk = self.kernel.regions.loops[0].listed
        return "" if walk is None else scalar(walk.stride)

    @property
    def listed_block(self) -> int:
        walk = self.kernel.regions.loops[0].listed
        return 0 if walk is None else walk.block

    @property
    def knows_full(self) -> bool:
        walk = self.kernel.regions.loops[0].listed
        return walk is not None and walk.knows_full

    def hides_some(self, at: str) -> str:
        """Returns what tells whether a tile of listed blocks is partial."""
        return f"hides_some_of(args.{self.bits}_ptr, list_line, {self.listed}, {at})"

    @property
    def bits(self) -> str:
        walk = self.kernel.regions.loops[0].listed
        return "" if walk is None else f"_{walk.memory}"

    @property
    def skips(self) -> bool:
        return bool(self.guard or self.listed)

    @property
    def end_of_kept(self) -> str:
        """Where zeros begin in a copied tile that must not hold what no query keeps: at the end of the loop,
        where a condition for them ends it.
        """
        step, over_keys = self.kernel.step, self.kernel.regions.axis == "kv"
        return self.end if over_keys and step.kept != step.kept_inside else "N"

    @property
    def keeps(self) -> str:
        return ", keeps" if self.fills and self.kernel.step.kept_inside is not None else ""

    @property
    def kept(self) -> str:
        assert self.kernel.step.kept_inside is not None
        return scalar(self.kernel.step.kept_inside)

    @property
    def kept_values(self) -> list[str]:
        assert self.kernel.step.kept_inside is not None
        fetches = fetches_for(kept_fetches(self.kernel), self.kernel.step.kept_inside)
        return [statement(fetch, self.dtypes, (), scalar) for fetch in fetches]

    @property
    def asks_partial_tiles_alone(self) -> bool:
        return self.kernel.regions.axis == "kv" and self.masked != "true" and bool(self.kept_values)
