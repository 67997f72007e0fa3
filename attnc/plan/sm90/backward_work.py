"""What the roles of a Hopper backward kernel exchange of a work tile, and what each computes for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnc.expr.nodes import Expr, Index, walk
from attnc.model.dtypes import DType
from attnc.plan.ir import Let, Statement, statement_expressions
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.steps import is_short_integer, names_in, names_of, needed_for


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWork:
    """Of one kernel. published: integers that producers and consumers read of a work tile: its place, its
    lengths, and bounds of its loops; sizes: sizes of the call that it replaces.

    scheduled, bounds: what the scheduler computes, before and of the bounds of loops; edge: what the edge of
    turns is computed from, as far as it varies from kv tile to kv tile; consumed: what is not published, and
    so computed by consumers: pointers, floats and flags of a head; produced: what producers compute of that.
    """

    published: tuple[str, ...]
    sizes: tuple[str, ...]
    scheduled: tuple[Statement, ...]
    bounds: tuple[Statement, ...]
    edge: tuple[Statement, ...]
    consumed: tuple[Statement, ...]
    produced: tuple[Statement, ...]


def plan_backward_work(
    kernel: BackwardKernel,
    dtypes: Mapping[str, DType],
    *,
    late: Sequence[Statement],
    edge: Expr | None,
    place: Sequence[str],
) -> BackwardWork:
    """Returns the work of a kernel. late: statements that consumers compute for each tile of the loop; edge:
    of turns, a bound, None without; place: names that say where a tile is.
    """
    own = tuple(x for x in (*kernel.program, *kernel.regions.bounds) if x not in late)
    integers = [x for x in own if is_short_integer(x, dtypes)]
    unpublished = tuple(x for x in own if x not in integers)
    found = needed_for({x.name for x in integers}, own)
    read = _read_by_steps(kernel, late)
    consumed = needed_for(read, unpublished)
    wanted = read.union(*map(names_in, consumed))
    made = find_sizes_of_tile(kernel)
    candidates = dict.fromkeys((*place, *made, *(x.name for x in integers)))
    return BackwardWork(
        published=tuple(name for name in candidates if name in (*place, *made) or name in wanted),
        sizes=made,
        scheduled=tuple(x for x in found if x not in kernel.regions.bounds),
        bounds=tuple(x for x in found if x in kernel.regions.bounds),
        edge=() if edge is None else _varying(needed_for(names_of(edge), own)),
        consumed=tuple(consumed),
        produced=tuple(needed_for(_read_by_walks(kernel), unpublished)),
    )


def find_sizes_of_tile(kernel: BackwardKernel) -> tuple[str, ...]:
    """Returns sizes that are found on the device, for each tile."""
    made = {item.name for item in kernel.program if isinstance(item, Let)} & {"M", "N"}
    made |= {"M" if kernel.over_q else "N"} if kernel.grid.sequences is not None else set()
    return tuple(sorted(made))


def _read_by_steps(kernel: BackwardKernel, late: Sequence[Statement]) -> frozenset[str]:
    step, dropout = kernel.step, kernel.softmax.dropout
    exprs: list[Expr] = [expr for loop in kernel.regions.loops for expr in loop.expressions]
    statements = (*kernel.regions.tests, *kernel.outer, *late, *step.fetches, *step.masked_fetches)
    exprs += [x for x in (step.score, step.keep, step.kept, step.kept_inside) if x is not None]
    exprs += [] if dropout is None else [dropout.p, dropout.seed, dropout.head]
    exprs += kernel.chain.expressions
    return frozenset({name for x in exprs for name in names_of(x)}.union(*map(names_in, statements)))


def _read_by_walks(kernel: BackwardKernel) -> set[str]:
    read = {name for test in kernel.regions.tests for name in names_in(test)}
    return read | {name for loop in kernel.regions.loops for x in loop.expressions for name in names_of(x)}


def _varying(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    found: list[Statement] = []
    for item in statements:
        exprs = statement_expressions(item)
        by_tile = any(Index(name) in walk(expr) for expr in exprs for name in ("kv_lo", "kv_hi"))
        if by_tile or names_in(item) & {x.name for x in found}:
            found.append(item)
    return tuple(found)
