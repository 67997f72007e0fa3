"""What a step of a backward kernel loads, by what it varies along."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from attnc.model.dtypes import DType
from attnc.plan.ir import Fetch, Statement
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.steps import fetches_for
from attnc.target.printer import Printer
from attnc.target.sm80.printer import load, value_type


class Loads:
    """The loads of one kernel: of its rows, which a thread keeps in an array; of a column, and of an element.

    mode: where the mask is tested, as `MaskTest.mode` says; show, statement: how the kernel prints an
    expression, and a statement; reads_score: whether a step has a name for the score.
    """

    def __init__(
        self,
        kernel: BackwardKernel,
        dtypes: Mapping[str, DType],
        *,
        mode: str,
        show: Printer,
        statement: Callable[[Statement], str],
        reads_score: bool = True,
    ) -> None:
        self._kernel, self._dtypes, self._mode = kernel, dtypes, mode
        self._show, self._statement, self._reads_score = show, statement, reads_score

    @cached_property
    def fetches(self) -> tuple[Fetch, ...]:
        step = self._kernel.step
        return tuple(dict.fromkeys((*self._kernel.outer, *step.fetches, *step.masked_fetches)))

    @property
    def row_fetches(self) -> tuple[Fetch, ...]:
        rows = ("q",) if self._kernel.over_q else ("kv",)
        return tuple(fetch for fetch in self.fetches if fetch.axes == rows)

    def row_array(self, fetch: Fetch) -> str:
        return f"{value_type(fetch, self._dtypes[fetch.load.tensor])} {fetch.name}[ROWS];"

    def row_value(self, fetch: Fetch) -> str:
        return f"{fetch.name}[r] = {load(fetch, self._dtypes[fetch.load.tensor], self._show)};"

    @property
    def needs_kv_idx(self) -> bool:
        kernel = self._kernel
        draws = kernel.softmax.dropout is not None
        return bool(kernel.chain.adjoints) or draws or kernel.uses("kv_idx")

    @property
    def columns(self) -> list[Fetch]:
        columns = ("kv",) if self._kernel.over_q else ("q",)
        return [fetch for fetch in self.fetches if fetch.axes == columns]

    @property
    def column_values(self) -> Iterator[str]:
        masked = self._kernel.step.masked_fetches
        for fetch in self.columns:
            if fetch not in masked or self._mode == "always":
                yield self._statement(fetch)
            elif self._mode == "each":
                dtype = self._dtypes[fetch.load.tensor]
                element = load(fetch, dtype, self._show)
                guarded = f"({element})" if " ? " in element else element
                yield f"const {value_type(fetch, dtype)} {fetch.name} = partial ? {guarded} : 0;"

    @property
    def column_mask_values(self) -> Iterator[str]:
        assert self._kernel.step.keep is not None
        wanted = fetches_for(self.fetches, self._kernel.step.keep)
        return (self._statement(fetch) for fetch in self.columns if fetch in wanted)

    @property
    def element_values(self) -> Iterator[str]:
        for fetch in self._kernel.step.fetches:
            if fetch.axes == ("q", "kv"):
                yield self._statement(fetch)
        for let in self._kernel.chain.shared:
            yield f"const float {let.name} = {self._show(let.value)};"
        if self._kernel.step.score is not None and self._reads_score:
            yield f"const float score = {self._show(self._kernel.step.score)};"

    @property
    def element_mask_values(self) -> Iterator[str]:
        assert self._kernel.step.keep is not None
        wanted = fetches_for(self.fetches, self._kernel.step.keep)
        for fetch in (*self._kernel.step.fetches, *self._kernel.step.masked_fetches):
            known = self._mode != "after" and fetch in self._kernel.step.fetches
            if fetch.axes == ("q", "kv") and fetch in wanted and not known:
                yield self._statement(fetch)
