"""What the scheduler of a Hopper forward kernel computes of a work tile, and the sizes that roles read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attnc.model.dtypes import DType
from attnc.plan.ir import Forward, Let
from attnc.plan.sm90 import roles_of
from attnc.target.sm80.printer import scalar, sizes_of_call, statement


class Work:
    """Of one kernel. scheduler_sizes, other_sizes: those of the call that the scheduler, and other roles,
    read: the others are those of a sequence, which it finds.
    """

    def __init__(self, kernel: Forward, dtypes: dict[str, DType]) -> None:
        self._kernel, self._dtypes, self._planned = kernel, dtypes, roles_of(kernel).work
        found = self._planned.sizes
        self.scheduler_sizes = self._sizes(name for name in found if name != "M")
        self.other_sizes = self._sizes(found)

    @property
    def scheduled(self) -> Iterator[str]:
        kernel = self._kernel
        shortened = {item.name for item in kernel.program if isinstance(item, Let)}
        for name in kernel.dims:
            if name in shortened:  # by the length of a sequence, which is another for the next tile
                yield f"int {name} = args.{name};"
        declared = {*kernel.dims, *(["M"] if kernel.grid.sequences is not None else [])}
        for item in self._planned.scheduled:
            if isinstance(item, Let) and item.name in ("M", "N") and item.name not in declared:
                declared.add(item.name)
                yield f"int {item.name} = {scalar(item.value)};"
            else:  # an assignment, where it shortens a size declared before
                yield statement(item, self._dtypes, tuple(declared))

    def _sizes(self, without: Iterable[str]) -> list[str]:
        left_out = set(without)
        return list(sizes_of_call(name for name in self._kernel.dims if name not in left_out))
