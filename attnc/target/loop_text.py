"""What texts of forward and backward kernels have in common, whatever the target."""

from __future__ import annotations

from attnc.expr.nodes import Const, Dim
from attnc.expr.show import show
from attnc.plan.ir import Kernel, Module
from attnc.plan.steps import starts_with
from attnc.target.quote import comment, expression


class LoopText:
    """Attribute by attribute what templates print of a kernel's loops, and of rows that they never reach."""

    module: Module
    kernel: Kernel

    @property
    def bounds_comment(self) -> str:
        """What stands over the bounds of the loops."""
        mask = self.module.variant.attention.mask
        if isinstance(mask, Const):
            return self.without_mask
        text = expression(mask.span) if mask.span else comment(show(mask))
        return f"{text}: which {self.kernel.regions.axis} tiles are partial, and which are full"

    @property
    def without_mask(self) -> str:
        """The same where there is no mask."""
        whole = "no mask: whole kv tiles, then the keys that are left"
        return whole if self.kernel.regions.axis == "kv" else ""

    def reads(self, index: str) -> bool:
        """Whether what comes before the step uses the index."""
        return starts_with(self.kernel, index)

    @property
    def clears(self) -> bool:
        """Whether rows that do not exist are written."""
        return self.kernel.stored != Dim("M")
