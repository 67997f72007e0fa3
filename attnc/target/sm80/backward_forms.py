"""What forms of normalisation differ in, in a CUDA kernel of gradients: which templates make the weights of a
tile once more, and the gradients of its scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnc.model.attention import Form
from attnc.plan.ir.backward import BackwardKernel
from attnc.target.sm80.backward_step import Factors, MaskTest


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaBackwardFormText:
    """Of weights that nothing divides, whose ds is dp. clears_rows: those past the end may be infinite."""

    kernel: BackwardKernel
    mask: MaskTest
    factors: Factors
    clears_rows: bool

    @property
    def step(self) -> str:
        """The template of a step, behind `cuda/_backward_`."""
        return "step"

    @property
    def element(self) -> str:
        """The template of what becomes of an element, behind `cuda/_backward_element_`."""
        return "weights"

    @property
    def taken(self) -> str:
        """The fragments that dv sums."""
        return "scores"

    @property
    def row(self) -> str:
        """What stands behind a number of the query at hand."""
        return "[r]" if self.kernel.over_q else ""

    @property
    def p_type(self) -> str:
        return "const float"

    @property
    def ds_type(self) -> str:
        return "const float" if self.kernel.chain.slope is None else "float"

    @property
    def ds(self) -> str:
        """The gradient of the weight at hand, which others may read."""
        is_read = self.kernel.chain.slope is None or bool(self.kernel.chain.adjoints)
        return self.if_kept("dp") if is_read else "dp"

    def if_kept(self, value: str) -> str:
        """Returns the value, 0 for a pair that the mask leaves out or that is past the end."""
        keeps = ["keep"] if self.mask.in_place else []
        conditions = [*keeps, *([self.mask.in_rows] if self.clears_rows else [])]
        return f"{' && '.join(conditions)} ? {value} : 0.0f" if conditions else value


class CudaStickBackwardText(CudaBackwardFormText):
    """Of keys that break off a share of what those behind them have left."""

    @property
    def step(self) -> str:
        return "sticks"

    @property
    def taken(self) -> str:
        return "taken"


class CudaSoftmaxBackwardText(CudaBackwardFormText):
    """Of p = exp(score - lse), and ds = p (dp - delta)."""

    @property
    def element(self) -> str:
        return "softmax" if self.kernel.softmax.dropout is None else "dropout"

    @property
    def p_type(self) -> str:
        changes = self.kernel.score_outgrows_lse or self.mask.in_place
        return "float" if changes else "const float"

    @property
    def ds_type(self) -> str:
        changes = self.clears_ds or self.kernel.chain.slope is not None
        return "float" if changes else "const float"

    @property
    def clears_ds(self) -> bool:
        """Whether dp of a masked key may be anything."""
        return self.mask.clears_ds and self.mask.in_place

    @property
    def clears_slope(self) -> bool:
        """Whether the slope of a masked score may be anything."""
        chain = self.kernel.chain
        return chain.slope_has_pole or (self.mask.in_place and not chain.slope_is_finite)


class CudaSoftpickBackwardText(CudaSoftmaxBackwardText):
    """Of (exp(score) - 1) / exp(lse), if above 0: what is below is in the denominator alone."""

    @property
    def element(self) -> str:
        return "softpick"


BACKWARD_FORMS: Mapping[Form, type[CudaBackwardFormText]] = {
    "softmax": CudaSoftmaxBackwardText,
    "softpick": CudaSoftpickBackwardText,
    "stick_breaking": CudaStickBackwardText,
    "none": CudaBackwardFormText,
}
