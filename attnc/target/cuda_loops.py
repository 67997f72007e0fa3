"""The loops of a CUDA kernel as text: one `for` runs over the tiles of all regions."""

from __future__ import annotations

from attnc.plan.ir import Statement
from attnc.plan.regions import guard_of, partial_test
from attnc.target.cuda import scalar
from attnc.target.loop_text import LoopText


class CudaLoopText(LoopText):
    """Attribute by attribute what `templates/cuda/*.jinja` print of loops and scores."""

    @property
    def lo(self) -> str:
        return scalar(self.kernel.regions.loops[0].start)

    @property
    def hi(self) -> str:
        return scalar(self.kernel.regions.loops[-1].stop)

    @property
    def masked(self) -> str:
        """Whether the tile at hand is partial."""
        return scalar(partial_test(self.kernel.regions))

    @property
    def guard(self) -> str:
        guard = guard_of(self.kernel.regions)
        return "" if guard is None else scalar(guard)

    @property
    def tests(self) -> tuple[Statement, ...]:
        """What the guard reads of the tile at hand."""
        return self.kernel.regions.tests

    @property
    def times_scale(self) -> str:
        return "" if self.kernel.softmax.scale is None else " * SCALE"
