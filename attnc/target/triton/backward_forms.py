"""What forms of normalisation differ in, in a backward kernel: how a tile has its weights once more, and what
the gradient of its scores is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnc.model.attention import Form
from attnc.plan.ir.backward import BackwardKernel, Chain
from attnc.target.printer import IN_ROWS, Printer


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardFormText:
    """Of weights that nothing divides, whose ds is dp.

    score, slope: its name, and the factor of ds that follows from how it is made; masked: whether the tile is
    cut short; keep_before: the line before that, by which all keys are kept; clears_rows: rows past the
    end may be anything; clears_ds: masked keys may.
    """

    kernel: BackwardKernel
    show: Printer
    score: str
    slope: str
    masked: str
    keep_before: str
    clears_rows: bool
    clears_ds: bool

    @property
    def weights(self) -> list[str]:
        """Lines that make p, or what it follows from, of the score."""
        past = self._in_rows("p", "  # past the end a weight may be anything")
        return [f"p = {self.score}", *past, *self._keep_before]

    @property
    def masking(self) -> list[str]:
        """Lines that leave masked keys out of it."""
        assert self.kernel.step.keep is not None
        return [f"keep = {self.show(self.kernel.step.keep)}", "p = tl.where(keep, p, 0.0)"]

    @property
    def taken(self) -> list[str]:
        """Lines that make p, if weights and masking have not."""
        return []

    @property
    def gradient(self) -> list[str]:
        """Lines that make ds of dp, before it gives to other gradients."""
        ds = ["ds = dp", *(self._cleared if self._chain.adjoints else [])]
        why = "  # dp of a masked key may be anything"
        return [*ds, *(self._if_masked(f"ds = {_UNLESS_MASKED}{why}") if self.clears_ds else [])]

    @property
    def chained(self) -> list[str]:
        """Lines that take ds down to the dot product."""
        is_clear = self._chain.slope is None and bool(self._chain.adjoints)
        return [*self._sloped, *([] if is_clear else self._cleared)]

    @property
    def picked(self) -> list[str]:
        """Lines that make what dv needs, where that is not p."""
        return []

    @property
    def kept(self) -> list[str]:
        """The same for what goes into memory, as p."""
        return []

    @property
    def _chain(self) -> Chain:
        return self.kernel.chain

    @property
    def _keep_before(self) -> list[str]:
        return [self.keep_before] if self.keep_before else []

    @property
    def _by_row(self) -> str:
        return "[:, None]" if self.kernel.over_q else "[None, :]"

    @property
    def _times_scale(self) -> str:
        return "" if self.kernel.softmax.scale is None else " * SCALE"

    @property
    def _sloped(self) -> list[str]:
        return [] if self._chain.slope is None else [f"ds = ds * {self.slope}"]

    def _if_masked(self, line: str) -> list[str]:
        return [f"if {self.masked}:", f"    {line}"]

    def _in_rows(self, name: str, why: str = "") -> list[str]:
        return [f"{name} = tl.where({self.show(IN_ROWS)}, {name}, 0.0){why}"] if self.clears_rows else []

    @property
    def _cleared(self) -> list[str]:
        """ds of keys that are not kept, and past the end, where what it is made of may be anything."""
        masked = [] if self.kernel.step.keep is None else self._if_masked("ds = tl.where(keep, ds, 0.0)")
        return [*masked, *self._in_rows("ds")]


class StickBackwardText(BackwardFormText):
    """Of sticks: left is -log2(1 - sigmoid(score)), behind what keys behind the tile leave, before the sum of
    p dp up to it and dlse.
    """

    @property
    def weights(self) -> list[str]:
        z = f"z = {self.score}{self._times_scale}"
        left = "left = _softplus(z)  # -log2(1 - sigmoid)"
        past = self._in_rows("z", "  # past the end a score may be anything")
        return [z, *past, left, *self._keep_before]

    @property
    def masking(self) -> list[str]:
        assert self.kernel.step.keep is not None
        return [f"keep = {self.show(self.kernel.step.keep)}", "left = tl.where(keep, left, 0.0)"]

    @property
    def taken(self) -> list[str]:
        behind = f"_sum_keys(left, KEYS={self._keys}, BEHIND=True) - behind{self._by_row}"
        return [f"p = tl.exp2(z - left - {behind})", *self._if_masked("p = tl.where(keep, p, 0.0)")]

    @property
    def gradient(self) -> list[str]:
        masked = self._if_masked("given = tl.where(keep, given, 0.0)") if self.clears_ds else []
        before = f"before{self._by_row} + _sum_keys(given, KEYS={self._keys}, BEHIND=False) + given"
        ds = f"ds = given - tl.exp2(z - left) * ({before})"
        return ["given = p * dp", *masked, ds, *(self._cleared if self._chain.adjoints else [])]

    @property
    def _keys(self) -> int:
        return 1 if self.kernel.over_q else 0


class SoftmaxBackwardText(BackwardFormText):
    """Of p = exp(score - lse), and ds = p (dp - delta)."""

    @property
    def weights(self) -> list[str]:
        p = f"p = tl.exp2({self.score}{self._times_scale} - lse2{self._by_row})"
        if not self.kernel.score_outgrows_lse:
            return [p]
        is_past = f'lse2{self._by_row} == float("inf")'
        return [p, f"p = tl.where({is_past}, 0.0, p)  # past the end a score may be anything"]

    @property
    def masking(self) -> list[str]:
        assert self.kernel.step.keep is not None
        return [f"p = tl.where({self.show(self.kernel.step.keep)}, p, 0.0)"]

    @property
    def gradient(self) -> list[str]:
        why = "  # dp of a masked key may be anything"
        return [*self._ds, *(self._if_masked(f"ds = {_UNLESS_MASKED}{why}") if self.clears_ds else [])]

    @property
    def chained(self) -> list[str]:
        chain = self._chain
        if chain.slope is None:
            return []
        if chain.slope_has_pole:
            why = "the slope of a masked score, or past the end, may be anything"
            return [*self._sloped, f"ds = {_UNLESS_MASKED}  # {why}"]
        if self.kernel.step.keep is None or chain.slope_is_finite:
            return self._sloped
        why = "the slope of a masked score may be anything"
        return [*self._sloped, *self._if_masked(f"ds = {_UNLESS_MASKED}  # {why}")]

    @property
    def _ds(self) -> list[str]:
        return [f"ds = p * (dp - delta{self._by_row})"]


class SoftpickBackwardText(SoftmaxBackwardText):
    """Of (exp(score) - 1) / exp(lse), if above 0: what is below is in the denominator alone."""

    @property
    def picked(self) -> list[str]:
        return [f"picked = {self._above_zero}"]

    @property
    def kept(self) -> list[str]:
        return [f"p = {self._above_zero}"]

    @property
    def _above_zero(self) -> str:
        one = f"tl.exp2(-lse2){self._by_row}"
        return f"tl.maximum(p - {one}, 0.0)  # softpick: (exp(s) - 1) / exp(lse), if above 0"

    @property
    def _ds(self) -> list[str]:
        delta = f"delta{self._by_row}"
        below = f"tl.where({self.score} < 0.0, {delta}, 0.0)"
        return [
            "# softpick: what is below 0 is in the denominator alone",
            f"ds = p * tl.where({self.score} > 0.0, dp - {delta}, {below})",
        ]


def cite_lines(sums_dv: bool, sums_dk: bool, adds_dq: bool) -> str:
    """Returns the lines of FlashAttention-2's algorithm that a step of a kernel over keys computes."""
    if not sums_dk:
        lines = "10 to 12"
    elif not sums_dv:
        lines = "10, 11, 13, 14, 16"
    else:
        lines = "10 to 16" if adds_dq else "10 to 14, 16"
    return f"FlashAttention-2, algorithm 2, lines {lines}"


#: ds of keys whose p is 0 because they are masked.
_UNLESS_MASKED = "tl.where(p == 0.0, 0.0, ds)"

BACKWARD_FORMS: Mapping[Form, type[BackwardFormText]] = {
    "softmax": SoftmaxBackwardText,
    "softpick": SoftpickBackwardText,
    "stick_breaking": StickBackwardText,
    "none": BackwardFormText,
}
