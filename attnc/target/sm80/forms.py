"""What forms of normalisation differ in, in a CUDA kernel that computes o: what a row starts from, how the
maximum moves, and what lse is of the sums. Blocks of statements are templates, which forms name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnc.model.attention import Form
from attnc.plan.ir import Decode, Forward, unified_of
from attnc.target.sm80.thread import ThreadRows


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFormText:
    """Of weights that nothing divides. times_scale: a factor of scores, "" for 1; in_segments: whether sums
    start from nothing in segments of keys, which what begins a row joins later.
    """

    kernel: Forward | Decode
    thread: ThreadRows
    times_scale: str
    in_segments: bool

    @property
    def update(self) -> str:
        """The template of what becomes of acc and of the scores of a tile, behind `cuda/_split_q_`."""
        return "weights"

    @property
    def weights(self) -> str:
        """The template of how scores become p, behind `cuda/_probabilities_`."""
        return ""

    @property
    def combine(self) -> str:
        """The template of the kernel that joins splits."""
        return "combine_sums"

    @property
    def declared(self) -> list[str]:
        """Declarations of what a thread keeps of its rows besides acc."""
        return []

    @property
    def start(self) -> list[str]:
        """Statements that give row r what it has before it has seen a key."""
        return []

    @property
    def lse2(self) -> str:
        """log2 of the sum of row r, or of what is left of its stick."""
        return ""

    @property
    def lse(self) -> str:
        return ""

    @property
    def lse_comment(self) -> str:
        return ""


class CudaStickText(CudaFormText):
    """Of keys that break off a share of what those behind them have left."""

    @property
    def update(self) -> str:
        return "sticks"

    @property
    def combine(self) -> str:
        return "combine_sticks"

    @property
    def declared(self) -> list[str]:
        return ["float rest[ROWS] = {};  // -log2 of what the keys so far leave of the stick"]

    @property
    def lse2(self) -> str:
        return "-rest[r]"

    @property
    def lse(self) -> str:
        return f"{self.lse2} * LN2"

    @property
    def lse_comment(self) -> str:
        return "lse = log(what is left of the stick)"


class CudaSoftmaxText(CudaFormText):
    """Of exp(score), which a running maximum bounds, over its sum."""

    @property
    def update(self) -> str:
        return "every_step" if self.kernel.softmax.rescale == "every_step" else "deferred"

    @property
    def weights(self) -> str:
        return "softmax" if self.kernel.softmax.dropout is None else "dropout"

    @property
    def combine(self) -> str:
        return "combine"

    @property
    def declared(self) -> list[str]:
        return ["float m[ROWS], l[ROWS];"]

    @property
    def start(self) -> list[str]:
        return ["m[r] = PHI;", "l[r] = 0.0f;"] if unified_of(self.kernel) else self.online_start

    @property
    def online_start(self) -> list[str]:
        """The same under a running maximum."""
        if self.kernel.softmax.sink is None or self.in_segments:
            return ["m[r] = -INF;", "l[r] = 0.0f;"]
        return [
            "// the sink joins the denominator as a key without a value",
            f"m[r] = {self.thread.first_m};",
            f"l[r] = {self.thread.first_lane} ? 1.0f : 0.0f;",
        ]

    @property
    def maximum(self) -> list[str]:
        """Statements that make m_new of m_tile, and shift, which exponents subtract, of that."""
        tile = f"m_tile{self.times_scale}"
        if self.kernel.softmax.rescale != "lazy":
            return [f"const float m_new = fmaxf(m[r], {tile});", self._shift]
        why = "// grows only when p could exceed 2^LAZY"
        return [why, f"const float m_new = {tile} > m[r] + LAZY ? {tile} : m[r];", self._shift]

    @property
    def _shift(self) -> str:
        why = "-inf - -inf is NaN: a row that has seen nothing"
        return f"const float shift = m_new == -INF ? 0.0f : m_new;  // {why}"

    def counted(self, exponential: str) -> str:
        """Returns what the denominator sums, of the exponential of a score."""
        return exponential

    @property
    def lse2(self) -> str:
        return "m[r] + log2f(l[r])"

    @property
    def lse(self) -> str:
        return f"({self.lse2}) * LN2"

    @property
    def lse_comment(self) -> str:
        return "line 13: lse = m + log(l)"


class CudaSoftpickText(CudaSoftmaxText):
    """Of exp(score) - 1, where that is above 0, over the sum of its sizes."""

    @property
    def weights(self) -> str:
        return "softpick"

    @property
    def online_start(self) -> list[str]:
        return [
            "// softpick: the maximum is that of the scores and 0, and a small number joins the denominator",
            "m[r] = 0.0f;",
            f"l[r] = {self.thread.first_lane} ? EPSILON : 0.0f;",
        ]

    @property
    def _shift(self) -> str:
        return "const float shift = m_new;  // at least 0"

    def counted(self, exponential: str) -> str:
        return f"fabsf({exponential} - exp2_(-shift))"


FORMS: Mapping[Form, type[CudaFormText]] = {
    "softmax": CudaSoftmaxText,
    "softpick": CudaSoftpickText,
    "stick_breaking": CudaStickText,
    "none": CudaFormText,
}
