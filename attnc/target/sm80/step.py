"""What a step of a kernel that computes o loads and computes of a tile of keys, statement by statement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attnc.expr.nodes import Expr
from attnc.expr.simplify import substitute
from attnc.model.dtypes import DType
from attnc.plan.ir import Decode, Fetch, Forward, Statement
from attnc.plan.order import sums_in_order
from attnc.plan.steps import fetches_for
from attnc.target.sm80.bits import text_of_bits
from attnc.target.sm80.printer import at_row, statement


class Step:
    """The step of one kernel. times_scale: a factor of scores, "" for 1; excluded: the score of a key that a
    row does not see, or its weight where nothing normalises; v_scale: what row r of o is multiplied by, ""
    for nothing. bits: words that are loaded once for a tile.
    """

    def __init__(self, kernel: Forward | Decode, dtypes: dict[str, DType]) -> None:
        self._kernel, self._dtypes, softmax = kernel, dtypes, kernel.softmax
        self.times_scale = "" if softmax.scale is None else " * SCALE"
        self.excluded = "-INF" if softmax.form in ("softmax", "stick_breaking") else "0.0f"
        self._sums_in_order = sums_in_order(kernel)
        self.bits = [text_of_bits(bits, dtypes[bits.fetch.load.tensor]) for bits in kernel.step.bits]
        self.v_scale = "" if softmax.v_scale is None else at_row(softmax.v_scale)

    def exponent(self, score: str, shift: str) -> str:
        """Returns what p is 2 to the power of; under an absolute order the text says what is rounded once."""
        if self._sums_in_order and self.times_scale:
            return f"fmaf({score}, SCALE, -{shift})"
        return f"{score}{self.times_scale} - {shift}"

    def statement(self, item: Statement) -> str:
        return statement(item, self._dtypes, self._kernel.dims)

    def key_statements(self, items: Iterable[Fetch]) -> Iterator[str]:
        """Yields loads of a key, which are the same for all rows of a thread."""
        return (self.statement(item) for item in items if "q" not in item.axes)

    def element_statements(self, items: Iterable[Fetch]) -> Iterator[str]:
        words = [bits.fetch for bits in self._kernel.step.bits]
        return (self.statement(item) for item in items if "q" in item.axes and item not in words)

    @property
    def score_fetches(self) -> tuple[Fetch, ...]:
        return self.fetches_along_keys(self._kernel.step.fetches, self._kernel.step.score)

    @property
    def mask_fetches(self) -> tuple[Fetch, ...]:
        step = self._kernel.step
        return self.fetches_along_keys((*step.fetches, *step.masked_fetches), step.keep)

    @property
    def value_fetches(self) -> tuple[Fetch, ...]:
        return self.fetches_along_keys(self._kernel.step.fetches, self._kernel.step.v_scale)

    def fetches_along_keys(self, fetches: tuple[Fetch, ...], expr: Expr | None) -> tuple[Fetch, ...]:
        candidates = [fetch for fetch in (*self._kernel.outer, *fetches) if "kv" in fetch.axes]
        return () if expr is None else fetches_for(candidates, expr)

    @property
    def keep(self) -> str:
        keep = self._kernel.step.keep
        return "" if keep is None else at_row(substitute(keep, dict(bits.bit for bits in self.bits)))

    @property
    def scores(self) -> list[str]:
        """Statements that make the score of an element, s, of its product."""
        score = self._kernel.step.score
        return [] if score is None else [f"s = {at_row(score)};"]

    @property
    def masks(self) -> list[str]:
        """Those that leave it out where the mask does not keep it."""
        if len(self.keep) <= 40:
            return [f"s = {self.keep} ? s : {self.excluded};"]
        return [f"const bool keep = {self.keep};", f"s = keep ? s : {self.excluded};"]

    @property
    def scaled(self) -> list[str]:
        """Those that multiply p, which is there too, by the scale of v that the key has."""
        scale = self._kernel.step.v_scale
        return [] if scale is None else [f"s = s * ({at_row(scale)});"]

    @property
    def scaled_if_kept(self) -> list[str]:
        """The same where p may be 0 because the key is not kept."""
        scale = self._kernel.step.v_scale
        return [] if scale is None else [f"s = s > 0.0f ? s * ({at_row(scale)}) : 0.0f;"]
