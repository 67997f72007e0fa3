"""What the lanes of a warp load of the columns of a tile for each other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from attnc.plan.ir import Fetch, fetch_expressions
from attnc.plan.sm90.backward_roles import list_shared_columns
from attnc.plan.steps import fetches_for
from attnc.target.sm80.loads import Loads
from attnc.target.sm80.printer import load


class SharedLoads(Loads):
    """The loads of a kernel of wgmma, of whose mask each lane loads some columns."""

    @cached_property
    def shared_columns(self) -> list[Fetch]:
        return list_shared_columns(self._kernel, self._dtypes) if self._mode == "after" else []

    @property
    def shared_column_values(self) -> Iterator[str]:
        read = fetches_for(self.columns, *fetch_expressions(self.shared_columns))
        for fetch in self.columns:
            if fetch in read:
                yield self._statement(fetch)
            if fetch in self.shared_columns:
                element = load(fetch, self._dtypes[fetch.load.tensor], self._show)
                yield f"{fetch.name}_of[i] = {fetch.name if fetch in read else element};"

    @property
    def column_mask_values(self) -> Iterator[str]:
        assert self._kernel.step.keep is not None
        loaded = [fetch for fetch in self.fetches if fetch not in self.shared_columns]
        wanted = fetches_for(loaded, self._kernel.step.keep)
        for fetch in self.columns:
            if fetch in self.shared_columns:
                yield f"const int {fetch.name} = shuffle({fetch.name}_of[j / 4], j % 4 * 8 + 2 * t + c);"
            elif fetch in wanted:
                yield self._statement(fetch)
