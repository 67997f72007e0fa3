"""What each role of a Hopper forward kernel computes of a work tile, statement by statement, and the fields
of a work tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

from attnc.expr.nodes import Expr, Index, Load, Ref
from attnc.expr.simplify import substitute
from attnc.model.dtypes import DType
from attnc.plan.ir import Forward, Let, Statement
from attnc.plan.regions import guard_of
from attnc.plan.sm90 import roles_of
from attnc.plan.sm90.roles import list_unpublished, unpublished_bounds
from attnc.plan.steps import is_short_integer, names_in, names_of, needed_for
from attnc.target.sm80.printer import scalar, sizes_of_call, statement


class Work:
    """Of one kernel. published, own: as `plan.sm90.roles.WorkTile` has them; claims: when a tile is claimed;
    own_ranges: whether each consumer walks over its own keys.
    """

    def __init__(self, kernel: Forward, dtypes: dict[str, DType], *, clusters: bool) -> None:
        roles = roles_of(kernel)
        self.published, self.own, self._made = roles.work.published, roles.work.own, roles.work.sizes
        self.claims, self.own_ranges = roles.claims, roles.own_ranges
        self._kernel, self._dtypes, self._clusters = kernel, dtypes, clusters
        self._late = list_unpublished(kernel, dtypes)
        self._late_bounds = unpublished_bounds(kernel, dtypes)

    @property
    def fields(self) -> Iterator[str]:
        yield f"int {', '.join(name for name in self.published if name not in self.own)};"
        if self.own:
            yield f"int {', '.join(f'{name}[CONSUMERS]' for name in self.own)};"
        if self._kernel.softmax.headroom:
            yield "int tile, recompute;  // its number, and whether it is computed again"
            yield "u32 failed_rows[4 * CONSUMERS];  // of each warp, by bits: see 'Lazy maximum'"

    @property
    def scheduler_sizes(self) -> list[str]:
        return self._sizes(name for name in self._made if name != "M")

    @property
    def other_sizes(self) -> list[str]:
        return self._sizes(self._made)

    @property
    def scheduled(self) -> Iterator[str]:
        kernel = self._kernel
        integers = [item for item in kernel.program if is_short_integer(item, self._dtypes)]
        read = self._read_by((*integers, *kernel.regions.statements))
        declared = {*kernel.dims, *(["M"] if kernel.grid.sequences is not None else [])}
        shortened = {item.name for item in kernel.program if isinstance(item, Let)}
        for name in kernel.dims:
            if name in shortened:  # by the length of a sequence, which is another for the next tile
                yield f"int {name} = args.{name};"
        for item in kernel.program:
            if item in integers:
                yield self._integer(item, declared)
            elif item.name in read:
                yield self._statement(item)

    @property
    def consumed(self) -> list[str]:
        return [self._statement(item) for item in self._late]

    @property
    def produced(self) -> list[str]:
        regions, rows = self._kernel.regions, self._kernel.rows
        read = self._read_by(regions.tests) if guard_of(regions) is not None else set()
        read |= {rows["k"].table} if "k" in rows else set()
        return [self._statement(item) for item in self._late if item.name in read]

    @property
    def walked(self) -> list[str]:
        if not self._clusters:
            return [self._statement(load) for load in self._late_bounds]
        first: dict[Expr, Expr] = {Index("q_lo"): Ref("cluster_lo", "int", natural=True)}
        return [
            self._statement(
                replace(x, load=cast(Load, substitute(x.load, first)), guard=substitute(x.guard, first))
            )
            for x in self._late_bounds
        ]

    def _statement(self, item: Statement) -> str:
        return statement(item, self._dtypes, self._kernel.dims)

    def _integer(self, item: Statement, declared: set[str]) -> str:
        if isinstance(item, Let) and item.name in ("M", "N") and item.name not in declared:
            declared.add(item.name)
            return f"int {item.name} = {scalar(item.value)};"
        return statement(item, self._dtypes, tuple(declared))

    def _read_by(self, statements: Iterable[Statement]) -> set[str]:
        loops, items = self._kernel.regions.loops, (*self._kernel.program, *self._late_bounds)
        read = {name for loop in loops for expr in loop.expressions for name in names_of(expr)}
        read.update(*map(names_in, statements))
        return read.union(*map(names_in, needed_for(read, items)))

    def _sizes(self, without: Iterable[str]) -> list[str]:
        left_out = set(without)
        return list(sizes_of_call(name for name in self._kernel.dims if name not in left_out))
