"""What forms of normalisation differ in, in a forward kernel: what rows start from, how p is made of scores,
and what o is of their sums. The step of a tile is a template for each `step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnc.model.attention import Form
from attnc.plan.ir import Decode, Forward
from attnc.plan.ir.module import split_of
from attnc.target.triton.printer import scalar


@dataclass(frozen=True, slots=True)
class FormText:
    """Of weights that nothing divides. adds_in_order: sums have the same bits wherever they are computed."""

    kernel: Forward | Decode
    adds_in_order: bool

    @property
    def step(self) -> str:
        return "weights"

    @property
    def carried(self) -> list[str]:
        """Names of what a step hands to the next one besides acc."""
        return []

    @property
    def excluded(self) -> str:
        return "0.0"

    @property
    def start(self) -> list[str]:
        """Lines of what a row has before it has seen a key, besides acc."""
        return []

    @property
    def maximum(self) -> list[str]:
        """Lines of m_new and of shift, which the exponent subtracts; none where there is no maximum."""
        return []

    @property
    def weights(self) -> list[str]:
        """Lines that make p of the score; they expect shift."""
        return []

    @property
    def counted(self) -> str:
        """What the denominator sums, if there is one."""
        return ""

    @property
    def finished(self) -> list[str]:
        return ["o = acc"]

    @property
    def lse(self) -> str:
        return "(m + tl.log2(l)) * LN2"

    @property
    def lse_comment(self) -> str:
        return "line 13: lse = m + log(l)"

    def in_first_split(self, value: str, otherwise: str) -> str:
        return value if split_of(self.kernel) is None else f"tl.where(split == 0, {value}, {otherwise})"


class StickText(FormText):
    """Of keys that break off a share of what those behind them have left."""

    @property
    def step(self) -> str:
        return "sticks"

    @property
    def carried(self) -> list[str]:
        return ["rest"]

    @property
    def excluded(self) -> str:
        return '-float("inf")'

    @property
    def start(self) -> list[str]:
        return ["rest = tl.zeros([BLOCK_M], tl.float32)  # -log2 of what the keys so far have left"]

    @property
    def lse(self) -> str:
        return "-rest * LN2"

    @property
    def lse_comment(self) -> str:
        return "lse = log(what is left of the stick)"


class SoftmaxText(FormText):
    """Of exp(score), which a running maximum bounds, over its sum."""

    @property
    def step(self) -> str:
        return "online"

    @property
    def carried(self) -> list[str]:
        return ["l", "m"]

    @property
    def excluded(self) -> str:
        return '-float("inf")'

    @property
    def start(self) -> list[str]:
        sink = self.kernel.softmax.sink
        if sink is None:
            return [
                'm = tl.full([BLOCK_M], -float("inf"), tl.float32)',
                "l = tl.zeros([BLOCK_M], tl.float32)",
            ]
        once = "" if split_of(self.kernel) is None else ", once,"
        first = self.in_first_split(f"tl.zeros([BLOCK_M], tl.float32) + {scalar(sink)}", '-float("inf")')
        return [
            f"# the sink joins the denominator{once} as a key without a value",
            f"m = {first}",
            f"l = {self.in_first_split('tl.full([BLOCK_M], 1.0, tl.float32)', '0.0')}",
        ]

    @property
    def maximum(self) -> list[str]:
        if self.kernel.softmax.rescale != "lazy":
            return [f"m_new = tl.maximum(m, tl.max(s, 1){self._times_scale})", self._shift]
        return [
            f"m_tile = tl.max(s, 1){self._times_scale}",
            "m_new = tl.where(m_tile > m + LAZY, m_tile, m)  # grows only when p could exceed 2**LAZY",
            self._shift,
        ]

    @property
    def _shift(self) -> str:
        loops = self.kernel.regions.loops
        everywhere = self.kernel.softmax.safe_everywhere or any(not isinstance(x.masked, bool) for x in loops)
        shift = 'tl.where(m_new == -float("inf"), 0.0, m_new)'
        alone = "" if everywhere else " if MASKED else m_new"
        return f"shift = {shift}{alone}  # -inf - -inf is NaN: rows yet unseen"

    @property
    def weights(self) -> list[str]:
        return [f"p = {self._exponent}"]

    @property
    def counted(self) -> str:
        return "p"

    @property
    def finished(self) -> list[str]:
        return ["o = acc"] if self.kernel.softmax.rescale == "every_step" else self._divided

    @property
    def _divided(self) -> list[str]:
        return [
            "# line 12: o = diag(l)^-1 acc. A row that saw nothing has l = 0 and gives o = 0, lse = -inf.",
            "o = acc * (1.0 / tl.where(l == 0.0, 1.0, l))[:, None]",
        ]

    @property
    def _times_scale(self) -> str:
        return "" if self.kernel.softmax.scale is None else " * SCALE"

    @property
    def _exponent(self) -> str:
        if self.adds_in_order and self.kernel.softmax.scale is not None:
            return "tl.exp2(tl.fma(s, SCALE, -shift[:, None]))"
        return f"tl.exp2(s{self._times_scale} - shift[:, None])"


class SoftpickText(SoftmaxText):
    """Of exp(score) - 1, where that is above 0, over the sum of its sizes."""

    @property
    def excluded(self) -> str:
        return "0.0"

    @property
    def start(self) -> list[str]:
        once = "" if split_of(self.kernel) is None else ", once"
        why = "the maximum is that of the scores and 0, and a small number joins the denominator"
        return [
            f"# softpick: {why}{once}",
            "m = tl.zeros([BLOCK_M], tl.float32)",
            f"l = {self.in_first_split('tl.full([BLOCK_M], EPSILON, tl.float32)', '0.0')}",
        ]

    @property
    def _shift(self) -> str:
        return "shift = m_new  # at least 0"

    @property
    def weights(self) -> list[str]:
        one = "tl.exp2(-shift)[:, None]  # exp(s) - 1, in units of exp(m)"
        return [f"excess = {self._exponent} - {one}", "p = tl.maximum(excess, 0.0)"]

    @property
    def counted(self) -> str:
        return "tl.abs(excess)"

    @property
    def _divided(self) -> list[str]:
        return ["# line 12: o = diag(l)^-1 acc", "o = acc * (1.0 / l)[:, None]"]


FORMS: Mapping[Form, type[FormText]] = {
    "softmax": SoftmaxText,
    "softpick": SoftpickText,
    "stick_breaking": StickText,
    "none": FormText,
}
